"""CUDA graphs: a program is recorded once, and then replayed with new inputs at the cost of a single launch.

A local training is thousands of small kernels; launching them one by one takes ten times as long as running them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.tree import Tree

T = TypeVar("T")
Program = Callable[[Tree], Any]


class Graphs:
    """A cache of recorded programs, by their name and the shapes of their inputs; the least recently used are dropped
    first. On a CPU nothing is recorded."""

    def __init__(self, device: torch.device, capacity: int = 64) -> None:
        self.enabled, self.capacity = device.type == "cuda", capacity
        self.side_stream: Any = None  # for a program that runs beside another one
        if self.enabled:
            self.side_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.inside = False  # is a program being recorded? Programs that it runs become part of its recording
        self.seen: set[int] = set()  # hashes only, since many signatures never come a second time
        self.recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()

    def run(self, name: Hashable, program: Program, inputs: Tree, at_once: bool = False) -> Any:
        """Run the program on the inputs. On CUDA it is recorded when it comes a second time (with `at_once`, already
        the first time) and replayed from then on.

        Programs of the same name must take inputs of the same structure; their shapes may differ. The outputs may be
        overwritten by the next run: use or copy them before it.
        """
        if not self.enabled or self.inside:
            return program(inputs)
        leaves = list(tree.leaves(inputs))
        signature = name, tuple([leaf.shape for leaf in leaves])
        recorded = self.recorded.get(signature)
        if recorded is None:
            if not at_once and (mark := hash(signature)) not in self.seen:
                self.seen.add(mark)
                return program(inputs)
            if len(self.recorded) == self.capacity:
                self.recorded.popitem(last=False)
            recorded = self.recorded[signature] = self._record(program, inputs)
        self.recorded.move_to_end(signature)
        return recorded(leaves)

    def _record(self, program: Program, inputs: Tree) -> _Recorded:
        whole = partial(self._run_inside, program)
        whole(inputs)  # warm up: whatever is compiled or allocated only once must not be part of the recording
        return _Recorded(whole, tree.map(self._static_input, inputs))

    def _run_inside(self, program: Program, inputs: Tree) -> Any:
        self.inside = True
        try:
            return program(inputs)
        finally:
            self.inside = False

    def forget(self, *kinds: str) -> None:
        """Drop recordings whose names begin with one of the kinds, and free their memory."""
        for signature in [known for known in self.recorded if known[0][0] in kinds]:  # type: ignore[index]
            del self.recorded[signature]
        torch.cuda.empty_cache()  # now, since it is not allowed while a program is recorded

    def branches(self, programs: Sequence[Callable[[], T]]) -> list[T]:
        """The results of programs that do not read each other's outputs. While a graph is captured, the first becomes
        a parallel branch of it with a higher priority; otherwise the programs run one after another, since the host
        does not launch kernels fast enough to keep two streams busy."""
        first, *others = programs
        if not others or self.side_stream is None or not torch.cuda.is_current_stream_capturing():
            return [program() for program in programs]
        main_stream = torch.cuda.current_stream()
        self.side_stream.wait_stream(main_stream)
        with torch.cuda.stream(self.side_stream):
            found = [first()]
        found += [program() for program in others]
        main_stream.wait_stream(self.side_stream)
        return found

    def _static_input(self, leaf: Tensor) -> Tensor:
        """The tensor from which a recorded program reads this input at every replay. If it is the output of another
        recording, it is that very tensor, so that nothing needs to be copied; otherwise a clone."""
        storage = leaf.untyped_storage().data_ptr()
        return (
            leaf if any(storage in recorded.output_storages for recorded in self.recorded.values()) else leaf.clone()
        )


class _Recorded:
    """A captured graph. It always reads its inputs and writes its outputs at the same addresses."""

    def __init__(self, program: Program, inputs: Tree) -> None:
        self.static_inputs = list(tree.leaves(inputs))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = program(inputs)
        self.output_storages = {leaf.untyped_storage().data_ptr() for leaf in _tensors(self.outputs)}

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        pairs = zip(self.static_inputs, inputs, strict=True)
        to_copy = [(a, b) for a, b in pairs if a.data_ptr() != b.data_ptr() or a.stride() != b.stride()]
        if to_copy:
            torch._foreach_copy_([static for static, _ in to_copy], [new for _, new in to_copy])
        self.graph.replay()
        return self.outputs


def _tensors(found: Any) -> list[Tensor]:
    """All tensors of nested dicts, lists and tuples."""
    if isinstance(found, Tensor):
        return [found]
    inner = found.values() if isinstance(found, dict) else found
    return [tensor for part in inner for tensor in _tensors(part)]
