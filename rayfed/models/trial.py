"""One trial of a model before a run: what clients and the server will do with it.

The trial works on copies and a few examples. A model may pass a forward pass and fail in the first
training step, or give other numbers in a copy. What would fail in a run is refused here, in a
sentence about the model. The model itself, and the process, stay as they were.

Shapes: `B` examples, `C` classes, `D` features.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy

from rayfed.base.errors import InputError
from rayfed.base.isolation import isolated
from rayfed.clients.optimizers import stepper
from rayfed.clients.settings import Training
from rayfed.data.inputs import Images, Inputs
from rayfed.models.classifier import features_and_logits, has_features
from rayfed.tensors.trees import first_difference
from rayfed.tensors.weights import (
    Weights,
    identical,
    in_evaluation,
    in_training,
    parameters_of,
    state_of,
    with_weights,
)

# The seed of what the model draws in its trial.
SEED = 0
# The trial takes two steps: a model that keeps something from its first may fail in the second.
STEPS = 2
# The examples times this number: only probabilities stay between 0 and 1 there.
FAR = 1000.0
# The sum of a row of probabilities may be that far from 1.
NEAR_ONE = 1e-3
# A message has at most that many names.
NAMED = 3
# These operations change only the form of a tensor; the names are autograd's.
FORMS = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias")


@dataclass(frozen=True, eq=False)
class Setting:
    """What a model is tried for."""

    name: str
    inputs: Inputs
    num_classes: int
    training: Training
    # Two or more examples of the training set, as a batch has them, (B, ...).
    examples: Tensor
    # The labels have the type int64 and the shape (B,).
    labels: Tensor
    # The reason why a batch of one example may be trained on; empty if no batch has one.
    alone_in_training: str
    # The reason why a batch of one example may be evaluated; empty if no batch has one.
    alone_in_evaluation: str


@dataclass(frozen=True)
class Findings:
    """What a run has to know of a model."""

    # The model writes to its inputs, or its head to the features, so each pass needs a copy.
    writes_to_inputs: bool
    # These buffers have no mean, and training leaves them as they are.
    constants: tuple[str, ...]
    # These parameters train, and got no gradient.
    unused: tuple[str, ...]
    warnings: tuple[str, ...]


def check_outputs(name: str, model: nn.Module, inputs: Inputs, num_classes: int) -> None:
    """Raise `InputError` if a model in evaluation mode gives no logits for such inputs.

    This pass makes the model's lazy layers. Dropout is off, and BatchNorm's statistics stay as they
    are.
    """
    examples = inputs.some(2)
    _refuse_modes(name, model)
    model.eval()
    with torch.no_grad():
        try:
            logits = model(examples)
        except Exception as error:
            raise InputError(
                f"model '{name}': cannot take {inputs}: {line_of(error)}"
                f"{_advice(str(error)) or _size_advice(inputs, str(error))}"
            ) from error
        _refuse_other_outputs(name, logits, f"2 {inputs}", 2, num_classes)
        if has_features(model):
            _refuse_other_head(name, model, examples, logits)
    model.train()


def _refuse_modes(name: str, model: nn.Module) -> None:
    """Raise `InputError` if the model cannot be put into its two modes."""
    advice = "; its train and eval must take what torch's do: train(mode=True), eval()"
    with _refusing(name, "it cannot be put into training and evaluation mode", advice):
        model.eval()
        model.train(False)
        model.train()


def try_model(model: nn.Module, setting: Setting) -> Findings:
    """Try a model on a setting's examples, and return what a run has to know of it.

    Raises `InputError` for whatever would fail in a run. Torch's generators and settings, the
    model's weights and its buffers stay as they were.
    """
    name = setting.name
    _refuse_entries(name, model)
    with isolated(SEED, torch.device("cpu")):
        trial_model = _copy(name, model)
        _refuse_other_sharing(name, model, trial_model)
        writes = _try_outputs(trial_model, setting)
        unused = _try_steps(trial_model, setting, writes)
        constants = _constants(name, model, trial_model)
        warnings: list[str] = []
        warnings.extend(_probabilities(trial_model, setting, writes))
        warnings.extend(_kept_outside(name, model, trial_model, setting, writes))
        warnings.extend(_in_plain_containers(name, model))
    return Findings(writes, constants, unused, tuple(warnings))


def line_of(error: BaseException) -> str:
    """Return the type and the first line of an error, without torch's notes for its developers.

    >>> line_of(ValueError("no such layer"))
    'ValueError: no such layer'
    """
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _refusing(name: str, failure: str, advice: str = "") -> Iterator[None]:
    """Raise `InputError` in place of what the model raises in the context.

    The message has the `failure`, its cause, and what to do.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        advice = advice or _advice(str(error))
        raise InputError(f"model '{name}': {failure}: {line_of(error)}{advice}") from error


def _advice(cause: str) -> str:
    """Say what to do about errors of torch that say little; return an empty text for others."""
    if "leaf Variable that requires grad" in cause or "modified by an inplace operation" in cause:
        return (
            "; give its operations in place (inplace=True, relu_, +=) up, or let them write to a "
            "clone()"
        )
    if "does not require grad" in cause:
        return (
            "; no gradient reaches its parameters: is there a detach, no_grad or argmax in its "
            "forward?"
        )
    if "backward through the graph a second time" in cause:
        return (
            "; it keeps a tensor from one batch to the next: keep it without its gradient, by "
            "detach()"
        )
    if "same dtype" in cause or "scalar type" in cause:
        return (
            "; its inputs are float32: give float32 parameters (model.float()), or convert the "
            "inputs in forward"
        )
    if "same device" in cause or "meta" in cause:
        return "; rayfed moves the model and its inputs: make no tensor on a device of its own"
    return ""


def _size_advice(inputs: Inputs, cause: str) -> str:
    """Say what to do if a model is perhaps made for images of another size."""
    if not isinstance(inputs, Images) or not ("shape" in cause or "size" in cause):
        return ""
    return "; make its layers for image_shape, or give data.size the size that it needs"


# The next functions check what the model holds.


def _in_plain_containers(name: str, model: nn.Module) -> Iterator[str]:
    """Yield a warning if layers are in a plain list, tuple or dictionary.

    Torch does not see them there. What is frozen is passed over: a teacher is often kept from torch
    in this way.
    """
    seen_by_torch = {id(parameter) for parameter in model.parameters()}
    unseen = []
    for place, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            items = value.values() if isinstance(value, dict) else value
            layers = nn.ModuleList(item for item in items if isinstance(item, nn.Module))
            trained = [entry for entry in layers.parameters() if entry.requires_grad]
            if any(id(entry) not in seen_by_torch for entry in trained):
                unseen.append(f"{place}.{attribute}" if place else attribute)
    if unseen:
        listed = ", ".join(f"'{attribute}'" for attribute in unseen[:NAMED])
        yield (
            f"model '{name}': the layers in {listed} are neither trained nor sent, as torch does "
            "not see layers in a plain list, tuple or dictionary; put them into nn.ModuleList or "
            "nn.ModuleDict, or freeze them with requires_grad_(False) if that is meant"
        )


def _refuse_entries(name: str, model: nn.Module) -> None:
    """Raise `InputError` for parameters and buffers that cannot be copied, sent or averaged."""
    _refuse_wrappers(name, model)
    with _refusing(name, "its state_dict() fails"):
        entries = dict(model.state_dict(keep_vars=True))
    for entry, value in entries.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"model '{name}': its state has '{entry}', {_kind(value)}, which is no tensor and "
                "has no mean over clients; keep it in a buffer (register_buffer), or without "
                "get_extra_state"
            )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for entry, tensor in tensors.items():
        _refuse_tensor(name, entry, tensor)
    for entry, parameter in parameters_of(model).items():
        _refuse_parameter(name, entry, parameter)


def _refuse_wrappers(name: str, model: nn.Module) -> None:
    """Raise `InputError` for a model that clients cannot train copies of, or not side by side."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(
            f"model '{name}': it is wrapped in {type(model).__name__}, and rayfed itself trains "
            "clients side by side; return the module inside, without the wrapper"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"model '{name}': torch.jit has made it, and clients cannot train copies of it; return "
            "the module itself, without torch.jit"
        )


def _refuse_tensor(name: str, entry: str, tensor: Tensor) -> None:
    """Raise `InputError` for a parameter or buffer without a shape or memory of its own."""
    if is_lazy(tensor):
        raise InputError(
            f"model '{name}': '{entry}' is of a lazy layer that a forward pass does not reach, "
            "and has no shape; remove the layer, or give its size"
        )
    if tensor.device.type != "cpu":
        raise InputError(
            f"model '{name}': '{entry}' is on the device '{tensor.device}'; return a model on the "
            "CPU, which rayfed moves to each worker's device (from 'meta': "
            "model.to_empty(device='cpu'), and set the weights)"
        )
    if tensor.numel() and _overlaps_itself(tensor):
        raise InputError(
            f"model '{name}': the elements of '{entry}' share memory, as expand() makes them, and "
            "it cannot be loaded; give it memory of its own, by clone()"
        )


def _refuse_parameter(name: str, entry: str, parameter: Tensor) -> None:
    """Raise `InputError` for a parameter that a client cannot train as it is."""
    if parameter.is_complex() or parameter.layout != torch.strided:
        kind = parameter.dtype if parameter.is_complex() else parameter.layout
        raise InputError(
            f"model '{name}': its parameter '{entry}' is {_plain(kind)}; parameters must be real "
            "and dense, and torch.view_as_complex makes a complex one of it in forward"
        )
    if not bool(torch.isfinite(parameter).all()):
        raise InputError(
            f"model '{name}': its parameter '{entry}' holds a NaN or an infinity before the run; "
            "set its values (torch.empty does not), or give it requires_grad=False if it is a mask"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise InputError(
            f"model '{name}': its parameter '{entry}' has a hook (register_hook), which the "
            "copies that clients train lose; do that in forward, or clip gradients by train.clip"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Say whether two elements of a tensor lie in one place."""
    if tensor.layout != torch.strided:
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _copy(name: str, model: nn.Module) -> nn.Module:
    """Return a copy of the model.

    Raises `InputError` if it cannot be copied, and names the attribute.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        place = _not_copied(model)
        raise InputError(
            f"model '{name}': it cannot be copied by copy.deepcopy, and each client trains a copy: "
            f"{line_of(error)}{place}; make locks, files and tensors with a gradient in forward, "
            "and keep none of them"
        ) from error


def _not_copied(model: nn.Module) -> str:
    """Say which attribute of the model cannot be copied, in words for a message."""
    for place, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key != "_modules"}
        for key, value in attributes.items():
            try:
                copy.deepcopy(value)
            except Exception:
                path = f"{place}.{key}" if place else key
                return f", in '{path}' ({_kind(value)})"
    return ""


def _refuse_other_sharing(name: str, model: nn.Module, copied: nn.Module) -> None:
    """Raise `InputError` if tensors share memory, and their copies do not.

    Two views of one tensor are an example.
    """
    split_groups = _sharing(model) - _sharing(copied)
    groups = sorted(sorted(names) for names in split_groups)
    if groups:
        listed = " and ".join(f"'{entry}'" for entry in groups[0][:NAMED])
        raise InputError(
            f"model '{name}': {listed} share memory, and in a copy of the model they do not: "
            "clients would train them apart; make one nn.Parameter, and take its part in forward "
            "(self.weight[:5])"
        )


def _sharing(model: nn.Module) -> set[frozenset[str]]:
    """Return the groups of names of tensors that lie in the same memory.

    A tensor with two names counts under its first name.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    groups: dict[int, set[str]] = {}
    for entry, tensor in tensors.items():
        if tensor.layout == torch.strided and tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), set()).add(entry)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


# The next functions check what the model gives.


def _try_outputs(model: nn.Module, setting: Setting) -> bool:
    """Try passes in both modes, without steps.

    Returns whether the model writes to its inputs. Raises `InputError` for outputs that are no
    logits, and for a pass that fails.
    """
    pair, single = setting.examples[:2], setting.examples[:1]
    writes_in_evaluation = _pass(in_evaluation(model), setting, pair, "in evaluation mode")
    if setting.alone_in_evaluation:
        try:
            _pass(model, setting, single, "in evaluation mode")
        except InputError as error:
            raise InputError(
                f"{setting.alone_in_evaluation}, and this model cannot take a single example "
                f"({error}); let its forward keep the dimension of the batch, or give another "
                "number of test images"
            ) from None
    if setting.alone_in_training:
        try:
            _pass(in_training(model), setting, single, "in training mode")
        except InputError as error:
            raise InputError(
                f"{setting.alone_in_training}, and this model cannot be trained on a single image "
                f"({error}); give another train.batch_size, or model"
            ) from None
    writes_in_training = _pass(in_training(model), setting, pair, "in training mode")
    return writes_in_evaluation or writes_in_training


def _pass(model: nn.Module, setting: Setting, examples: Tensor, mode: str) -> bool:
    """Say whether the model, or its head, writes to its inputs in a forward pass.

    Raises `InputError` for outputs that are no logits.
    """
    inputs = examples.clone()
    features = features_before = None
    with _refusing(setting.name, f"its forward fails {mode}"), torch.no_grad():
        if has_features(model):
            features = model.features(inputs)
            features_before = features.clone()
            logits = model.head(features)
        else:
            logits = model(inputs)
    described = f"{len(examples)} {setting.inputs} {mode}"
    _refuse_other_outputs(setting.name, logits, described, len(examples), setting.num_classes)
    if bool(torch.isnan(logits).any()):
        raise InputError(
            f"model '{setting.name}': before any training its outputs {mode} are NaN, for the "
            "first examples of the training set; look for a division by 0, a root or a logarithm "
            "in it"
        )
    wrote = not identical(inputs, examples)
    if features is not None and features_before is not None:
        wrote = wrote or not identical(features, features_before)
    return wrote


def _refuse_other_outputs(
    name: str, logits: Any, examples: str, count: int, num_classes: int
) -> None:
    """Raise `InputError` if a model's outputs are no logits (B, C)."""
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else _kind(logits)
    if shape != (count, num_classes):
        raise InputError(
            f"model '{name}': logits of {examples} need the shape ({count}, {num_classes}), not "
            f"{shape}{_outputs_advice(logits)}"
        )
    if not logits.is_floating_point():
        raise InputError(
            f"model '{name}': logits of {examples} must be real numbers with a gradient, not "
            f"{_plain(logits.dtype)}; return the scores of the classes, not the class"
        )


def _outputs_advice(outputs: Any) -> str:
    """Say what to do if a model gives more than its logits."""
    if isinstance(outputs, Tensor):
        return ""
    if hasattr(outputs, "logits") or (isinstance(outputs, dict) and "logits" in outputs):
        return "; return its logits alone"
    return (
        "; return one tensor, the logits alone, in both modes (of torchvision's: aux_logits = "
        "false)"
    )


def _refuse_other_head(name: str, model: nn.Module, examples: Tensor, logits: Tensor) -> None:
    """Raise `InputError` if `features` and `head` do not give what `forward` gives."""
    try:
        features, through_head = features_and_logits(model, examples.clone(), copied=True)
        assert features is not None
        agrees = features.ndim == 2 and torch.allclose(through_head, logits, equal_nan=True)
    except Exception as error:
        raise InputError(
            f"model '{name}': head(features(images)) fails: {line_of(error)}"
        ) from error
    if not agrees:
        raise InputError(
            f"model '{name}': features(images) must have the shape (B, D), and head of them must "
            f"give the model's logits; features here: {tuple(features.shape)}"
        )


# The next functions check what a training step does.


def _try_steps(model: nn.Module, setting: Setting, writes: bool) -> tuple[str, ...]:
    """Take steps on the cross-entropy, and return the parameters that got no gradient.

    Raises `InputError` for a step that fails, for a sparse gradient, and for a step that changes
    the form of the model's state.
    """
    name, state_before = setting.name, state_of(model)
    examples, labels = setting.examples[:2], setting.labels[:2]
    parameters = parameters_of(in_training(model))
    step = stepper(parameters, setting.training, round=1)
    reached: set[str] = set()
    for _ in range(STEPS):
        with _refusing(name, "a training step fails"):
            _, logits = features_and_logits(model, examples.clone(), copied=writes)
            loss = cross_entropy(logits, labels)
            _refuse_sparse(name, parameters, loss)
            _, logits = features_and_logits(model, examples.clone(), copied=writes)
            loss = cross_entropy(logits, labels)
            step(loss)
        for entry, parameter in parameters.items():
            if parameter.grad is not None:
                reached.add(entry)
                parameter.grad = None
    difference = first_difference(state_of(model), state_before)
    if difference is not None:
        raise InputError(
            f"model '{name}': a training step changes the form of its state: {difference}, as it "
            "began; make its buffers in __init__, in their final shape, or register them with "
            "persistent=False"
        )
    return tuple(entry for entry in parameters if entry not in reached)


def _refuse_sparse(name: str, parameters: Weights, loss: Tensor) -> None:
    """Raise `InputError` for a parameter whose gradient is sparse.

    The steps and the methods take dense gradients.
    """
    loss.backward()
    for entry, parameter in parameters.items():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise InputError(
                f"model '{name}': the gradient of its parameter '{entry}' is sparse; give its "
                "layer sparse=False, which trains to the same weights"
            )


def _constants(name: str, model: nn.Module, trained: nn.Module) -> tuple[str, ...]:
    """Return the buffers that have no mean, and that steps leave unchanged.

    Raises `InputError` for those that steps change.
    """
    trained_state = trained.state_dict()
    unchanged = []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for entry, buffer in model.state_dict().items():
        if entry in parameters or _has_a_mean(buffer):
            continue
        if identical(buffer, trained_state[entry]):
            unchanged.append(entry)
        elif not _has_a_mean(trained_state[entry]):
            raise InputError(
                f"model '{name}': its buffer '{entry}' ({_plain(buffer.dtype)}) is changed by "
                "training, and has no mean over clients, as it is complex, sparse, or holds a NaN "
                "or an infinity; if clients need not send it, register it with persistent=False"
            )
    return tuple(unchanged)


def _has_a_mean(tensor: Tensor) -> bool:
    """Say whether the mean over clients of such a tensor is defined."""
    if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
        return False
    return bool(torch.isfinite(tensor).all())


# The next functions warn of what its user may not mean.


def _probabilities(model: nn.Module, setting: Setting, writes: bool) -> Iterator[str]:
    """Yield a warning if the outputs are probabilities, in one of the modes."""
    modes: dict[str, Callable[[nn.Module], nn.Module]] = {
        "in training mode": in_training,
        "in evaluation mode": in_evaluation,
    }
    affected: list[str] = []
    for mode, switch in modes.items():
        if _gives_probabilities(switch(model), setting.examples, writes):
            affected.append(mode)
    if affected:
        in_mode = "" if len(affected) == len(modes) else f" {affected[0]}"
        yield (
            f"model '{setting.name}': its outputs are probabilities{in_mode}, and the losses take "
            "logits: the softmax would be taken twice, and training would hardly get on; return "
            "what goes into its softmax or sigmoid"
        )


def _gives_probabilities(model: nn.Module, examples: Tensor, writes: bool) -> bool:
    """Say whether all outputs are probabilities, also far from the examples.

    They lie between 0 and 1, and either rows sum to 1 or a sigmoid made them.
    """
    _, logits = features_and_logits(model, examples.clone(), copied=writes)
    operation = _last_operation(logits)
    sums_to_one = True
    # The outputs of a model that has diverged in its trial say nothing.
    if not bool(torch.isfinite(logits).any()):
        return False
    for rows in (logits, _far(model, examples, writes)):
        rows = rows[torch.isfinite(rows).all(dim=1)].detach().float()
        if bool(((rows < 0) | (rows > 1 + NEAR_ONE)).any()):
            return False
        sums_to_one = sums_to_one and bool(((rows.sum(dim=1) - 1).abs() < NEAR_ONE).all())
    return sums_to_one or operation == "Sigmoid"


def _far(model: nn.Module, examples: Tensor, writes: bool) -> Tensor:
    """Return the outputs (B, C) on inputs that no data have.

    Tokens stay as they are. Returns no rows (0, 1) if the model refuses the inputs.
    """
    far = examples * FAR if examples.is_floating_point() else examples
    try:
        with torch.no_grad():
            return features_and_logits(model, far.clone(), copied=writes)[1]
    except Exception:
        return torch.empty(0, 1)


def _last_operation(logits: Tensor) -> str:
    """Return the last operation that made the logits, as autograd names it: 'Sigmoid'.

    Operations that change only the form are passed over.
    """
    node = logits.grad_fn
    while node is not None:
        operation = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
        if operation not in FORMS:
            return operation
        node = node.next_functions[0][0] if node.next_functions else None
    return ""


def _kept_outside(
    name: str, model: nn.Module, trained: nn.Module, setting: Setting, writes: bool
) -> Iterator[str]:
    """Yield a warning if the trained weights give other outputs in a copy of the model.

    The trained model then keeps something outside its parameters and buffers.
    """
    with _refusing(name, "the weights of a copy cannot be loaded into another"):
        loaded = with_weights(model, state_of(trained))
    outputs = []
    for candidate in (trained, loaded):
        examples = setting.examples.clone()
        with (
            isolated(SEED, torch.device("cpu")),
            torch.no_grad(),
            _refusing(name, "a copy with other weights fails"),
        ):
            _, logits = features_and_logits(in_evaluation(candidate), examples, copied=writes)
        outputs.append(logits)
    trained_logits, loaded_logits = outputs
    finite = bool(torch.isfinite(trained_logits).all() and torch.isfinite(loaded_logits).all())
    if finite and not torch.allclose(trained_logits, loaded_logits, rtol=1e-3, atol=1e-4):
        yield (
            f"model '{name}': a copy with its trained weights gives other outputs than the trained "
            "model: it keeps something outside its parameters and buffers (a counter, a plain "
            "tensor, a generator of its own), which no client sends; keep it in a buffer "
            "(register_buffer)"
        )


def _kind(value: Any) -> str:
    """Return the name of a value's type."""
    return type(value).__name__


def _plain(kind: Any) -> str:
    """Return a type or a layout of torch, without 'torch.'."""
    return str(kind).removeprefix("torch.")
