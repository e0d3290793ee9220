"""The [model] table of a job file: a model's name and options, and keys of every model.

The keys of every model change a model after it is built.
"""

from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Annotated, Any

from rayfed.base.errors import spelled
from rayfed.base.values import Checked, Form, Ge, Gt, PathMark, build, named, table

# Each module of this package has the models of these names; each is a function.
HOMES = {
    "convnets": ("cnn", "lenet", "circle"),
    "resnet": ("resnet8", "resnet10", "resnet18", "resnet50", "resnet56"),
    "vision": ("mobilenet", "alexnet"),
    "dense": ("text", "mlp"),
}
MODELS = tuple(chain.from_iterable(HOMES.values()))


@dataclass(frozen=True)
class Lora(Checked):
    """LoRA (Hu et al., ICLR 2022): layers keep their weights and learn a low-rank change.

    The change is `alpha / rank` times a product of two matrices of that rank.
    """

    rank: Annotated[
        int, Ge(0), "rank of the matrices that LoRA trains beside each layer; 0: no LoRA"
    ] = 0
    alpha: Annotated[float, Gt(0), "what LoRA's matrices give is multiplied by alpha / rank"] = 8.0
    targets: Annotated[
        list[str], "patterns of layers' names; none: all linear and convolution layers but the head"
    ] = field(default_factory=list)


@dataclass(frozen=True)
class Adapt(Checked):
    """The keys of every model: where its weights come from, and which of them train."""

    weights: Annotated[
        str, PathMark(), "safetensors file with the weights to begin with; empty: the seed's"
    ] = ""
    freeze: Annotated[
        list[str], "patterns of names of parameters that do not train, and are never sent"
    ] = field(default_factory=list)
    weight_standardisation: Annotated[
        float,
        Ge(0),
        "deviation of each filter's weights once their mean is subtracted, in all linear and "
        "convolution layers but the head; 0: weights as they are; FedWSQ: 0.001",
    ] = 0.0
    lora: Lora = field(default_factory=Lora)


@dataclass(frozen=True)
class Model(Checked):
    """The [model] table: a name, the options of that model, and the keys of every model."""

    name: str = "cnn"
    options: dict[str, Any] = field(default_factory=dict)
    adapt: Adapt = field(default_factory=Adapt)


def _read(value: Any) -> Model:
    """Return the [model] table from a name, or from a table with a name."""
    name, options = named(value, "model", default="cnn")
    adapt_options = {
        field.name: options.pop(field.name) for field in fields(Adapt) if field.name in options
    }
    return Model(spelled(name, MODELS), options, build(Adapt, adapt_options, "model"))


def _write(model: Model) -> dict[str, Any]:
    """Return the [model] table in the form that `_read` reads."""
    return {"name": model.name, **model.options, **table(model.adapt)}


# What `rayfed keys` calls the keys that every model has.
ANY = "any model"
MODEL = Form(_read, _write, default="cnn", kinds={ANY: Adapt}, imports_torch=True)
MODEL_TEXT = f"{', '.join(MODELS)}, or package.module:function, or timm/NAME, and its options"
