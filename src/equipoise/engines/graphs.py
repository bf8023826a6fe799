"""CUDA graphs: a program recorded once and replayed with new inputs, at the cost of a single launch.

A local training is thousands of small kernels; launching them one by one takes ten times as long as running them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise import tree
from equipoise.tree import Tree

T = TypeVar("T")
Program = Callable[[Tree], Any]


class Graphs:
    """Programs by name and shapes, recorded when they come a second time, or at once; the least recently used are
    forgotten."""

    def __init__(self, device: torch.device, most: int = 64) -> None:
        self.recording, self.most = device.type == "cuda", most
        self.side: Any = None  # a stream for programs that go beside others
        if self.recording:
            self.side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.within = False  # is a program being recorded? What it is made of is then part of that recording
        self.seen: set[int] = set()  # hashes, since some hardly ever come a second time
        self.recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()

    def run(self, name: Hashable, program: Program, inputs: Tree, at_once: bool = False) -> Any:
        """What the program makes of the inputs, of whose structure its name tells. It may be overwritten by the next
        run: use it up, or copy it."""
        if not self.recording or self.within:
            return program(inputs)
        leaves = list(tree.leaves(inputs))
        signature = name, tuple([leaf.shape for leaf in leaves])
        recorded = self.recorded.get(signature)
        if recorded is None:
            if not at_once and (mark := hash(signature)) not in self.seen:
                self.seen.add(mark)
                return program(inputs)
            if len(self.recorded) == self.most:
                self.recorded.popitem(last=False)
            recorded = self.recorded[signature] = self._record(program, inputs)
        self.recorded.move_to_end(signature)
        return recorded(leaves)

    def _record(self, program: Program, inputs: Tree) -> _Recorded:
        whole = partial(self._inline, program)
        whole(inputs)  # whatever is made only once is made here
        return _Recorded(whole, tree.map(self._kept, inputs))

    def _inline(self, program: Program, inputs: Tree) -> Any:
        self.within = True
        try:
            return program(inputs)
        finally:
            self.within = False

    def forget(self, *kinds: str) -> None:
        """What was recorded under names that begin so, and give back the memory that it held."""
        for signature in [known for known in self.recorded if known[0][0] in kinds]:  # type: ignore[index]
            del self.recorded[signature]
        torch.cuda.empty_cache()  # which cannot be done any more while a program is recorded

    def branches(self, programs: Sequence[Callable[[], T]]) -> list[T]:
        """What programs give that do not read from each other. In a graph that is recorded they go side by side, the
        first with priority; else one after another, since the host does not launch fast enough for more."""
        first, *others = programs
        if not others or self.side is None or not torch.cuda.is_current_stream_capturing():
            return [program() for program in programs]
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            found = [first()]
        found += [program() for program in others]
        here.wait_stream(self.side)
        return found

    def _kept(self, leaf: Tensor) -> Tensor:
        """Where a recorded program reads an input: where another one writes it, so that it need not be moved."""
        where = leaf.untyped_storage().data_ptr()
        return leaf if any(where in recorded.writes for recorded in self.recorded.values()) else leaf.clone()


class _Recorded:
    def __init__(self, program: Program, inputs: Tree) -> None:
        self.places = list(tree.leaves(inputs))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = program(inputs)
        self.writes = {leaf.untyped_storage().data_ptr() for leaf in _tensors(self.outputs)}

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        pairs = zip(self.places, inputs, strict=True)
        moved = [(a, b) for a, b in pairs if a.data_ptr() != b.data_ptr() or a.stride() != b.stride()]
        if moved:
            torch._foreach_copy_([mine for mine, _ in moved], [new for _, new in moved])
        self.graph.replay()
        return self.outputs


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    inner = found.values() if isinstance(found, dict) else found
    return [tensor for part in inner for tensor in _tensors(part)]
