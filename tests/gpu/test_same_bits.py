"""On a GPU, a job has the same bits every time, and nearly the numbers of a CPU."""

import pytest
import torch

from rayfed.data.augment import prepare
from rayfed.data.settings import Augment
from rayfed.methods import RECIPES
from rayfed.models.registry import MODELS
from rayfed.tensors.trees import Scaled
from rayfed.tensors.weights import squared_distance, state_of
from rayfed.tensors.wire import pack, unpack

# A thread of torch's that uses cuBLAS first makes the context itself, and warns of it.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]

# Parts of the way that the weights go in six steps. Another order of float32 sums turns some ReLUs
# and pools the other way, and steps amplify that: between two kinds of kernels on a CPU (with and
# without oneDNN) it was 2e-6 to 2e-3, depending on the method, and 0.019 in bf16, whose products
# are wrong by up to 0.4 %. A pretended GPU has no TF32.
PRECISIONS = [
    "float32",
    "bf16",
    *(["tf32"] if torch.cuda.is_available() else []),
]
STEPS = {"num_rounds": 2, "local_steps": 3}
NEAR, NEAR_IN_BF16 = 0.01, 0.1
# Some methods amplify rounding far more: FedDecorr divides by the deviation of features that hardly
# vary. On a CPU, initial weights that differ by a part of 1e-6 lead 0.49 of the way elsewhere in
# six steps, and 0.0003 in a single one.
ONE_STEP = {"num_rounds": 1, "local_steps": 1}


def way_between(ours, theirs, start):
    """The distance of two results, as a part of the way from the start."""
    names = [name for name, tensor in start.items() if tensor.is_floating_point()]
    a, b, c = (
        {name: weights[name].double() for name in names} for weights in (ours, theirs, start)
    )
    return float((squared_distance(a, b) / squared_distance(b, c)).sqrt())


def test_cuda_is_set_before_it_is_used(card, begin, make_table):
    told = begin("settings", make_table())()
    assert told["workspace"] == ":4096:8"
    kind = told["kind"]
    assert kind["device"] == torch.cuda.get_device_name(card)
    assert (kind["tf32 in cudnn"], kind["float32"], kind["deterministic"]) == (
        "no",
        "highest",
        "yes",
    )


# It trains no client.
@pytest.mark.parametrize("name", sorted({*RECIPES} - {"ccvr"}))
def test_a_method_has_the_same_bits_twice_and_nearly_the_cpus_numbers(
    name, make_job_setup, train, bits
):
    def apart(setup, on_gpu):
        return way_between(on_gpu.weights, train(setup, gpu=False).weights, state_of(setup.model))

    # What these methods need of the model.
    needed: dict = {
        "fedbn": {"name": "resnet8"},
        "fedwsq": {"name": "cnn", "weight_standardisation": 0.05},
    }
    model = needed.get(name, {"name": "cnn"})
    setup = make_job_setup(name, model, **STEPS)
    last = train(setup)
    assert bits(last) == bits(train(setup))
    if apart(setup, last) > NEAR:
        first = make_job_setup(name, model, **ONE_STEP)
        assert apart(first, train(first)) <= NEAR


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", sorted({*MODELS} - {"text", "mlp"}))
def test_a_model_has_the_same_bits_twice(model, precision, make_job_setup, train, bits):
    """An operation without such a form would be an error.

    Without augmentation, the teacher is asked once.
    """
    setup = make_job_setup(
        "fedntd", model, augment={}, precision=precision, lr=0.001, num_rounds=1, local_steps=4
    )
    assert bits(train(setup)) == bits(train(setup))


def test_bf16_is_used_and_is_nearly_float32(make_job_setup, train):
    setup, exact = (
        make_job_setup("fedntd", precision=precision, **STEPS) for precision in ("bf16", "float32")
    )
    ours, theirs = train(setup).weights, train(exact).weights
    assert 0 < way_between(ours, theirs, state_of(setup.model)) <= NEAR_IN_BF16


@pytest.mark.parametrize("model", ["cnn", "resnet10"])
def test_other_processes_have_the_same_bits_alone_and_side_by_side(model, make_table, begin):
    table = make_table("fedntd", model)
    alone = begin("train", table)()["digest"]
    side_by_side = [begin("train", table) for _ in range(3)]
    assert [answer()["digest"] for answer in side_by_side] == [alone] * 3
    assert begin("train", table, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})()["digest"] == alone


@pytest.mark.parametrize("part", [1.02, 0.8, 0.6])
def test_too_little_memory_is_an_error_and_never_other_bits(part, card, make_table, begin):
    """cuDNN may have a slower way for when its workspace does not fit, which would round
    otherwise.
    """
    table = make_table("fedntd", "resnet10")
    free = begin("train", table)()
    cap = part * free["peak"] / torch.cuda.get_device_properties(card).total_memory
    assert begin("train", table, cap=cap)()["digest"] in (free["digest"], "out of memory")


def test_a_client_on_the_gpu_neither_feels_nor_moves_its_generator(
    make_job_setup, train, device, bits
):
    # It has dropout.
    setup = make_job_setup("fedavg", "mobilenet", num_rounds=1, lr=0.001)
    first = bits(train(setup))
    torch.rand(1000, device=device)
    before = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    assert bits(train(setup)) == first
    assert torch.equal(
        before, torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    )


@pytest.mark.parametrize(
    "augment",
    [
        Augment(),
        Augment(crop=4),
        Augment(crop=4, flip=True, cutout=16),
        Augment(crop=4, crop_padding="reflect", flip=True),
    ],
    ids=repr,
)
def test_augmented_images_are_the_cpus_while_the_gpu_is_busy(augment, device):
    """Copies to the GPU are not waited for: an index that changed meanwhile would show."""
    raw = torch.randint(
        0, 256, (500, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    here, there = (
        prepare(raw.to(on), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), augment) for on in ("cpu", device)
    )
    load = torch.rand(1024, 1024, device=device)
    for seed in range(50 if device.type == "cuda" else 3):
        load = (load @ load).clamp(max=1)
        order, rng = (
            torch.randperm(500, generator=torch.Generator().manual_seed(seed)),
            torch.Generator,
        )
        draws = there.draws(order[:64], rng().manual_seed(seed))
        images = there.augmented(draws.to(device, non_blocking=True))
        expected = here.augmented(here.draws(order[:64].clone(), rng().manual_seed(seed)))
        order.zero_()
        assert torch.equal(images.cpu(), expected)


def test_a_tree_on_several_devices_is_packed(device):
    tree = {
        "scaled": Scaled(
            3, {"w": torch.randn(3, 4, 5, 6, device=device).to(memory_format=torch.channels_last)}
        ),
        "list": [torch.tensor(7, device=device), torch.tensor(8), None, 1.5],
        "tuple": (torch.tensor([True, False], device=device), torch.empty(0, device=device)),
        "bf16": torch.randn(5, device=device, dtype=torch.bfloat16),
        "both": {"there": torch.randn(2, device=device), "here": torch.randn(2)},
    }
    back = unpack(pack(tree))
    assert torch.equal(back["scaled"].values["w"], tree["scaled"].values["w"].cpu())
    assert [int(back["list"][0]), int(back["list"][1]), *back["list"][2:]] == [7, 8, None, 1.5]
    assert back["tuple"][0].tolist() == [True, False] and back["tuple"][1].numel() == 0
    assert torch.equal(back["bf16"], tree["bf16"].cpu())
    assert all(torch.equal(back["both"][name], tree["both"][name].cpu()) for name in tree["both"])


def test_a_driver_leaves_cuda_to_the_processes_that_it_forks(make_table, begin):
    assert begin("fork", make_table())() == {"started": False, "child": "2.0"}
