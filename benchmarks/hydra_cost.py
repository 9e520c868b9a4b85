"""What the models of HYDRA's evaluation cost on the machine it used: the numbers that `hydra_figures.py` simulates.

From the paper (Nagrecha and Kumar, MLSys 2022):

* section 6, "Machine Setup": 8 GTX 1080 Ti of 11 GB, 512 GB of host memory, one Xeon with 10 cores of 2.20 GHz;
* Table 2: BERT-Large, scaled to 1B parameters, on WikiText-2: batches of 8, 16 and 32, four learning rates, 4 epochs;
  ViT, 300M, 600M, 800M, 1B, 1.5B and 2B parameters, on CIFAR-10: batches of 64 and 128, 5 epochs; 12 models of each;
* section 5.2: 15% of a device's memory is the buffer of double buffering.

From elsewhere: a GTX 1080 Ti has 3,584 cores at 1.58 GHz, 11.3 TFLOP/s in single precision (NVIDIA); WikiText-2 has
2,088,628 tokens to train on (Merity et al.), CIFAR-10 50,000 images; a layer of BERT-Large and of ViT-Large is 1,024 wide
with 16 heads, and PCIe 3.0 x16 has 15.75 GB/s.

Assumed, since the paper does not say; nothing is fitted to its results:

* Models are as many layers of the -Large kind as their parameters ask for, 12 h^2 each. Embeddings, heads, norms and
  biases are left out, and so is the time of the optimizer.
* Training is in single precision with Adam: a parameter is 4 bytes, its gradient 4, its moments 8.
* Half the peak is attained, 5.67 TFLOP/s, whatever the batch. A link attains 12 GB/s, each GPU has one to itself, and it
  sends both ways at once. Sensitivity to each of these is one of the tables.
* The CUDA context takes 512 MiB of each GPU.
* BERT's sequences are 128 tokens, the shorter of the two lengths it was trained with: with 512, one model with a batch of 32
  exceeds all 8 GPUs, but the paper trained it by model parallelism. ViT's images are 32 x 32 in patches of 8 x 8, 17 tokens
  with the class: with 4 x 4, the 2B model with a batch of 128 exceeds all 8 GPUs.

Derived, for a layer of width h with a heads, on a batch of b sequences of s tokens:

* forward: b s (24 h^2 + 4 s h) FLOPs; backward: twice that;
* kept from forward to backward: b s (66 h + 9 a s) bytes, which is what Korthikanti et al. (Reducing Activation
  Recomputation in Large Transformer Models, section 4.1) count, with 4 bytes for each of their 2 and masks of 1 byte;
* across a cut: 4 b s h bytes.

Shards are Algorithm 1's: as many layers as fit 85% of a device with parameters, gradients, moments and kept activations;
and no more than the buffer holds, for the simulator loads a shard whole or not at all. A device holds the largest shard and a
full buffer. A forward unit loads parameters. A backward unit loads parameters and moments, 12 bytes for each parameter;
gradients are made and used there. They are two things to load: the shard goes home in between.

The paper does not say how a backward unit comes by the activations of its forward unit, so both ways are simulated:

* `recompute`: it runs the forward again, as this project's pool does;
* `keep`: the forward unit writes them to host memory, and they are loaded again with the shard.

The last shard's forward and backward are one unit in both. With double buffering, what is written back goes the other
way while the device computes, and takes no time. Without, the device would have to wait for that as well; Table 3 has both.
"""

import itertools
import math
from dataclasses import dataclass, replace

from baselines import TrialCost

from hydra_tune.schedule import Unit
from hydra_tune.simulate import Scenario, SimulatedTrial
from hydra_tune.simulate.workload import equal_devices

WIDTH, HEADS = 1024, 16
LAYER_PARAMETERS = 12 * WIDTH**2
PARAMETER_BYTES, STATE_BYTES, TRAINING_BYTES = 4, 12, 16
"""Of a parameter: itself; with its moments; with its gradient as well."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The paper's machine.

    Args:
        flops: attained by each device, a second.
        link_bytes: of each device, a second.
        shared_bytes: of all loads together, a second; None: links share nothing.
        memory_bytes: of each device.
        context_bytes: of that, not for training.
        buffer_fraction: of that, for double buffering.
        state_bytes: loaded for the backward of each parameter.
        even_shards: models are cut into no more shards than Algorithm 1 makes, but evenly, without its small last one.
    """

    flops: float = 0.5 * 2 * 3584 * 1.582e9
    link_bytes: float = 12e9
    shared_bytes: float | None = None
    memory_bytes: int = 11 * 2**30
    context_bytes: int = 512 * 2**20
    buffer_fraction: float = 0.15
    state_bytes: int = STATE_BYTES
    even_shards: bool = False

    @property
    def buffer_bytes(self) -> int:
        """For the shard that comes next."""
        return int(self.buffer_fraction * self.memory_bytes)

    @property
    def shard_room_bytes(self) -> int:
        """For a shard at work."""
        return self.memory_bytes - self.context_bytes - self.buffer_bytes

    @property
    def stage_room_bytes(self) -> int:
        """For a stage of model parallelism, which needs no buffer."""
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True, kw_only=True)
class Model:
    """One trial.

    Args:
        parameters: about how many; the model has as many layers as come closest.
        batch: samples of a minibatch.
        tokens: of a sample.
        samples: of an epoch.
        epochs: how many.
    """

    parameters: float
    batch: int
    tokens: int
    samples: int
    epochs: int

    @property
    def num_layers(self) -> int:
        """Layers that come closest to the parameters."""
        return max(1, round(self.parameters / LAYER_PARAMETERS))

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return self.epochs * math.ceil(self.samples / self.batch)

    @property
    def layer_flops(self) -> float:
        """Of a layer's forward pass."""
        return self.batch * self.tokens * (24 * WIDTH**2 + 4 * self.tokens * WIDTH)

    @property
    def kept_bytes(self) -> int:
        """What a layer keeps for its backward pass."""
        return self.batch * self.tokens * (66 * WIDTH + 9 * HEADS * self.tokens)

    @property
    def boundary_bytes(self) -> int:
        """What crosses a cut, one way."""
        return 4 * self.batch * self.tokens * WIDTH

    @property
    def training_bytes(self) -> int:
        """Of a layer, on a device that trains it."""
        return TRAINING_BYTES * LAYER_PARAMETERS + self.kept_bytes

    def layer_seconds(self, machine: Machine) -> float:
        """Of a layer's forward pass."""
        return self.layer_flops / machine.flops


def bert(batch: int, parameters: float = 1e9, epochs: int = 4) -> Model:
    return Model(parameters=parameters, batch=batch, tokens=128, samples=2_088_628 // 128, epochs=epochs)


def vit(batch: int, parameters: float, epochs: int = 5) -> Model:
    return Model(parameters=parameters, batch=batch, tokens=17, samples=50_000, epochs=epochs)


def bert_workload() -> list[Model]:
    """Table 2, first row: learning rates change no times."""
    return [bert(batch) for batch in (8, 16, 32) for _ in range(4)]


def vit_workload() -> list[Model]:
    """Table 2, second row."""
    return [vit(batch, parameters) for parameters in (3e8, 6e8, 8e8, 1e9, 1.5e9, 2e9) for batch in (64, 128)]


def num_stages(model: Model, machine: Machine) -> int:
    """The fewest devices that hold a model whole, its activations included; at least 2."""
    return max(2, math.ceil(model.num_layers / (machine.stage_room_bytes // model.training_bytes)))


def _evenly(num_layers: int, count: int) -> list[int]:
    bounds = [index * num_layers // count for index in range(count + 1)]
    return [end - start for start, end in itertools.pairwise(bounds)]


def stages(model: Model, machine: Machine, count: int, *, recompute: bool = False) -> TrialCost:
    """The model on so many devices, layers spread evenly; nothing ever leaves them."""
    layers = _evenly(model.num_layers, count)
    seconds = model.layer_seconds(machine)
    return TrialCost(
        num_steps=model.steps,
        forward_seconds=tuple(n * seconds for n in layers),
        backward_seconds=tuple(n * seconds * (3 if recompute else 2) for n in layers),
        boundary_bytes=(model.boundary_bytes,) * (count - 1),
        parameter_bytes=tuple(n * LAYER_PARAMETERS * PARAMETER_BYTES for n in layers),
    )


def shards(model: Model, machine: Machine, *, keep: bool) -> list[int]:
    """The layers of each shard, by Algorithm 1."""
    load_bytes = machine.state_bytes * LAYER_PARAMETERS + (model.kept_bytes if keep else 0)
    most = min(machine.shard_room_bytes // model.training_bytes, machine.buffer_bytes // load_bytes)
    if most < 1:
        raise ValueError(f"one layer of {model} does not fit {machine}")
    if machine.even_shards:
        return _evenly(model.num_layers, math.ceil(model.num_layers / most))
    full, rest = divmod(model.num_layers, most)
    return [most] * full + ([rest] if rest else [])


def trial(name: str, model: Model, machine: Machine, *, keep: bool, write_back: bool = False) -> SimulatedTrial:
    """The model as shard units. Of K shards, number k is what its forward loads, K + k what its backward loads.

    The simulator takes what is written back for free. With `write_back` it is added to what is loaded, so that the
    device waits for it, as it must where nothing overlaps.
    """
    layers, seconds = shards(model, machine, keep=keep), model.layer_seconds(machine)
    count, last = len(layers), len(layers) - 1
    forward = [Unit(kind="forward", shard=k, seconds=n * seconds) for k, n in enumerate(layers[:-1])]
    backward = [
        Unit(kind="backward", shard=count + k, seconds=n * seconds * (2 if keep and k != last else 3))
        for k, n in enumerate(layers)
    ]
    parameters = [n * LAYER_PARAMETERS for n in layers]
    kept = [n * model.kept_bytes if keep and k != last else 0 for k, n in enumerate(layers)]
    return SimulatedTrial(
        name=name,
        step=(*forward, *reversed(backward)),
        shard_bytes=(
            *[PARAMETER_BYTES * n + write_back * more for n, more in zip(parameters, kept, strict=True)],
            *[machine.state_bytes * (1 + write_back) * n + more for n, more in zip(parameters, kept, strict=True)],
        ),
        steps=model.steps,
        boundary_bytes=model.boundary_bytes,
    )


def scenario(
    models: list[Model],
    machine: Machine,
    num_devices: int,
    *,
    keep: bool,
    overlap: bool = True,
    write_back: bool = False,
) -> Scenario:
    """All models on so many devices of the machine. Without double buffering there is no buffer either."""
    trials = tuple(
        trial(f"trial{index}", model, machine, keep=keep, write_back=write_back) for index, model in enumerate(models)
    )
    largest = max(max(one.shard_bytes) for one in trials)
    return Scenario(
        trials=trials,
        devices=equal_devices(
            num_devices,
            memory_bytes=largest + (machine.buffer_bytes if overlap else 0),
            bandwidth=machine.link_bytes,
        ),
        overlap=overlap,
        node_bandwidth=machine.shared_bytes,
    )


def shortened(model: Model, share: float) -> Model:
    """The same model with a share of its steps: ratios need no more."""
    return replace(model, samples=max(1, round(model.steps * share)) * model.batch, epochs=1)
