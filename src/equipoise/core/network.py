"""A `torch.nn.Module` as a pure function: `network(params, buffers, x, context) -> outputs, buffers`.

Stacking clients pads short batches and shares one program between them, so two kinds of layers are swapped for
ones that read a `Context`: batch norm takes its statistics over the real samples only, and dropout draws its mask
from a key. A padded batch then equals the true short batch, and a repeated draw is the same draw. The mask and the
key reach the layers as two extra buffers, which keeps the module itself free of state. On a CPU images go in with
their channels last, which is faster there, if the model can take them. The room `fast` may swap further layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.core import random, speed
from equipoise.core.errors import ConfigError
from equipoise.core.tree import Tree


class Context(NamedTuple):
    """How a batch is to be read: which samples are real, the key of its draws, training or evaluation."""

    mask: Tensor
    key: Tensor
    train: bool


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def _unchanged(x: Tensor) -> Tensor:
    return x


class MaskedBatchNorm(nn.Module):
    """Batch norm over the real samples of a batch.

    Where a channel has a single value, as in a batch of one without pixels, statistics of the batch are undefined
    and the running ones are used (PyTorch refuses such a batch).
    """

    mask: Tensor
    materialise: Callable[[Tensor], Tensor]  # the same values, computed once by compiled code
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, original: BatchNorm) -> None:
        super().__init__()
        self.materialise = speed.faster("materialise", _unchanged)
        self.eps, self.momentum = original.eps, original.momentum
        self.weight, self.bias = original.weight, original.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(original, name))
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        values = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if self.training or self.running_mean is None:
            mean, var = self._batch_statistics(values)
        else:
            assert self.running_var is not None
            mean, var = self.running_mean, self.running_var
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        # Materialised, or a compiler would compute both again for every value.
        scale, shift = self.materialise(torch.stack([scale, shift])).unbind()
        values = values * scale.view(shape) + shift.view(shape)
        return values.to(x.dtype)

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.mask.view([-1] + [1] * (x.dim() - 1))
        count = mask.sum() * x[0, 0].numel()
        real = count.clamp(min=1).to(x.dtype)
        # Both moments in one pass over the values; around the running mean, so that large means cost no digits.
        near = torch.zeros_like(x[0].flatten(1)[:, 0]) if self.running_mean is None else self.running_mean
        some = torch.where(mask, x - near.view([1, -1] + [1] * (x.dim() - 2)), 0)
        moments = torch.stack([_by_channel(some), _by_channel(some.square())])
        off, square = (self.materialise(moments) / real).unbind()
        mean, var = near + off, (square - off * off).clamp(min=0)
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return mean, var
        alone = count <= 1
        mean = torch.where(alone, self.running_mean, mean)
        var = torch.where(alone, self.running_var, var)
        if self.training:
            tracked = self.num_batches_tracked + (~alone)
            rate = 1 / tracked.clamp(min=1).to(x.dtype) if self.momentum is None else self.momentum
            unbiased = var * (real / (real - 1).clamp(min=1))
            self.num_batches_tracked = tracked
            moved = self.running_var + rate * (unbiased - self.running_var)
            self.running_mean = self.running_mean + rate * (mean - self.running_mean)
            self.running_var = torch.where(alone, self.running_var, moved)
        return mean, var


def _by_channel(values: Tensor) -> Tensor:
    """Sums over samples and places; on CPU over the places of a sample first, so that cores share the samples."""
    places = list(range(2, values.dim()))
    if places and values.device.type == "cpu":
        return values.sum(places).sum(0)
    return values.sum([0, *places])


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the context's key and the layer's place in the model.

    The layer moves its key on, so that one which is used twice in a model drops differently each time.
    """

    key: Tensor

    def __init__(self, p: float, place: int, channels: bool) -> None:
        super().__init__()
        self.p, self.place, self.channels = p, place, channels
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        if self.channels:
            shape[2:] = [1] * (x.dim() - 2)
        size = 1
        for length in shape:
            size *= length
        self.key = random.fold(self.key, self.place)
        dropped = random.chance(self.key, size, self.p).view(shape)
        return torch.where(dropped, 0, x / (1 - self.p) if self.p < 1 else x)


def _swap(module: nn.Module) -> nn.Module:
    """The module with other layers in place of some, in order of appearance; a layer that is shared stays shared."""
    swapped: dict[nn.Module, nn.Module] = {}
    place, quicken = 0, speed.faster("layer", _leave_alone)
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            swapped[layer] = MaskedBatchNorm(layer)
        elif isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            place += 1
            swapped[layer] = KeyedDropout(layer.p, place, channels=not isinstance(layer, nn.Dropout))
        else:
            quicken(layer)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                parent._modules[name] = swapped[child]
    return swapped.get(module, module)


def _leave_alone(layer: nn.Module) -> None:
    pass


class Network:
    """The functional form of a module, its initial parameters and its buffers."""

    def __init__(self, module: nn.Module, kind: Hashable | None = None) -> None:
        """Networks of the same `kind` differ in nothing but their numbers; by default each is of its own."""
        self.kind = object() if kind is None else kind
        module = _swap(copy.deepcopy(module))
        self.module = module
        named = dict(module.named_parameters())
        self.params: Tree = {name: p.detach().clone() for name, p in named.items() if p.requires_grad}
        layers = dict(module.named_modules())
        self._masks = [f"{k}.mask".lstrip(".") for k, m in layers.items() if isinstance(m, MaskedBatchNorm)]
        self._keys = [f"{k}.key".lstrip(".") for k, m in layers.items() if isinstance(m, KeyedDropout)]
        self._channels_last = False  # until `check` has seen that the model can take such images
        extra = {*self._masks, *self._keys}
        # Frozen parameters are values that training reads and does not change, like buffers.
        fixed = {k: p for k, p in named.items() if not p.requires_grad} | dict(module.named_buffers())
        self.buffers: Tree = {k: b.detach().clone() for k, b in fixed.items() if k not in extra}
        # Two copies, because a mode switch walks the whole module and would happen at every step.
        self._modes = {True: module.train(), False: copy.deepcopy(module).eval()}
        for mode in self._modes.values():
            mode.requires_grad_(False)
        self.head: str | None = (
            None  # the name of the linear layer whose output is the model's output, if there is one
        )
        self._bodies: dict[bool, nn.Module] = {}  # the module in both modes without its head
        self._looked_for_head = False

    def __call__(self, params: Tree, buffers: Tree, x: Tensor, context: Context) -> tuple[Tensor, Tree]:
        values = {**params, **buffers}
        values |= dict.fromkeys(self._masks, context.mask) | dict.fromkeys(self._keys, context.key)
        if self._channels_last and x.device.type == "cpu":
            x = channels_last(x)
        outputs: Tensor = torch.func.functional_call(self._modes[context.train], values, (x,))
        # functional_call leaves reassigned buffers in the dict it was given.
        return outputs, {name: values[name] for name in buffers}

    def split(
        self,
        params: Tree,
        buffers: Tree,
        x: Tensor,
        context: Context,
        change: Callable[[Tensor], Tensor] = _unchanged,
    ) -> tuple[Tensor, Tensor, Tree]:
        """The same as a call, in two parts: outputs, the features that the head reads after `change`, and buffers."""
        weight, bias = (".".join(part for part in (self.head, name) if part) for name in ("weight", "bias"))
        own = {**params, **buffers}
        values = {name: value for name, value in own.items() if name not in (weight, bias)}
        values |= dict.fromkeys(self._masks, context.mask) | dict.fromkeys(self._keys, context.key)
        if self._channels_last and x.device.type == "cpu":
            x = channels_last(x)
        features = change(torch.func.functional_call(self._bodies[context.train], values, (x,)))
        outputs = nn.functional.linear(features, own[weight], own.get(bias))
        return outputs, features, {name: values.get(name, own[name]) for name in buffers}

    def find_head(self, shape: Sequence[int]) -> None:
        """Look, once, for the head: the linear layer whose output is the model's output for samples of this shape."""
        if self._looked_for_head:
            return
        self._looked_for_head = True
        probe, given = copy.deepcopy(self._modes[False]), list[tuple[str, Tensor]]()
        for name, layer in probe.named_modules():
            if type(layer) is nn.Linear:
                layer.register_forward_hook(lambda _, __, output, name=name: given.append((name, output)))
        x = torch.zeros(2, *shape, dtype=next(iter(self.params.values()), torch.zeros(())).dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                outputs = probe(x)
            except Exception:  # `check` says what is wrong with a model that cannot take such samples
                return
        names = [name for name, output in given if output is outputs]
        if len(names) != 1 or [name for name, _ in given].count(names[0]) != 1:
            return
        self.head = names[0]
        self._bodies = {train: _without(copy.deepcopy(mode), names[0]) for train, mode in self._modes.items()}

    def check(self, x: Tensor, classes: int) -> None:
        """Refuse, before the first round, a model that cannot be trained as a pure function of its inputs."""
        if not self.params:
            raise ConfigError("model: it has no parameter that requires a gradient, so there is nothing to train")
        guilty: list[str] = []

        def watch(name: str, layer: nn.Module) -> None:
            if isinstance(layer, nn.RReLU):  # it draws only for negative inputs, which two samples need not give it
                guilty.append(f"{name or 'the model'} (RReLU)")
            before: list[Tensor] = []
            layer.register_forward_pre_hook(lambda *_: before.append(torch.get_rng_state()))

            def after(*_: object) -> None:
                if not torch.equal(before.pop(), torch.get_rng_state()):
                    guilty.append(f"{name or 'the model'} ({type(layer).__name__})")

            layer.register_forward_hook(after)

        probe = copy.deepcopy(self.module).train().to(x.device, x.dtype)
        for name, layer in probe.named_modules():
            watch(name, layer)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name in self._masks:
                probe.get_submodule(name.rpartition(".")[0]).mask = x.new_ones(len(x), dtype=torch.bool)
            try:
                outputs = probe(x)
            except Exception as error:
                shape = tuple(x.shape[1:])
                raise ConfigError(f"model: it cannot take samples of shape {shape}: {error}") from error
        if guilty:
            raise ConfigError(
                f"model: {guilty[0]} draws from torch's own generator, so runs could not be repeated or resumed;"
                " use nn.Dropout (which is keyed here) or draw nothing"
            )
        expected = (len(x), classes)
        if not isinstance(outputs, Tensor):
            raise ConfigError(f"model: it gives a {type(outputs).__name__}, expected a tensor of shape {expected}")
        if tuple(outputs.shape) != expected:
            raise ConfigError(
                f"model: it gives outputs of shape {tuple(outputs.shape)} for {len(x)} samples,"
                f" expected {expected}: one score per class"
            )
        self._channels_last = _takes_channels_last(probe, x)


def _without(module: nn.Module, head: str) -> nn.Module:
    """The module with nothing in the place of its head."""
    if not head:
        return nn.Identity()
    parent, _, name = head.rpartition(".")
    setattr(module.get_submodule(parent), name, nn.Identity())
    return module


def channels_last(x: Tensor) -> Tensor:
    """The same images, with the channels of a pixel side by side in memory; under vmap too."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def initialised(model: Callable[[], nn.Module], seed: int, kind: Hashable | None = None) -> Network:
    """The network that a run with this seed starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(random.bits(seed, random.INIT)) & ((1 << 63) - 1))
        return Network(model(), kind)


def _takes_channels_last(module: nn.Module, x: Tensor) -> bool:
    """Are there convolutions, and does nothing behind them, such as `view`, refuse their outputs?"""
    if x.dim() != 4 or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            module(channels_last(x))
        except RuntimeError:
            return False
    return True
