"""The client half: one site's data, what its methods keep, and an answer to every request.

It runs the same taps as a simulation, through the serial engine over a federation in which all other clients are
empty. Whatever a request asks for is checked first; a request that cannot be answered is answered by the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import __version__, predict, tree
from equipoise.data.holdout import holdout
from equipoise.data.samples import Samples, read_samples
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.packets import pack, read_chain, read_local, read_question, unpack
from equipoise.deploy.versions import MemoryLost, Version, Versions
from equipoise.deploy.wire import LIMIT, Packet, WireError, failure
from equipoise.engines.memory import Memories
from equipoise.engines.serial import Serial
from equipoise.engines.sums import Result, summed
from equipoise.errors import EquipoiseError
from equipoise.federation import Split
from equipoise.local import Task
from equipoise.tree import Tree

Reader = Callable[[dict[str, Any]], Samples]  # from the options that the server names: the label column, ...


def reading(path: Path) -> Reader:
    """The reader of a file or folder of the site's own."""

    def read(options: dict[str, Any]) -> Samples:
        features = options.get("features")
        return read_samples(path, **{**options, "features": None if features is None else tuple(features)})

    return read


class Site:
    """One site of a federation. `folder` is its own: what methods keep, and at the end the model."""

    def __init__(
        self,
        name: str,
        read: Reader,
        folder: Path,
        *,
        device: str = "cpu",
        models: tuple[str, ...] = (),
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.name, self.read, self.folder = name, read, folder
        self.device, self.models, self.say = device, models, say
        self.finished: Path | None = None  # the final model, once the server has sent it
        self._samples: tuple[str, Samples] | None = None
        self._desk: _Desk | None = None

    @torch.no_grad()
    def answer(self, request: Packet, limit: int = LIMIT) -> Packet:
        """The reply to a request; one that cannot be carried out is answered by the reason."""
        try:
            if request.nbytes > limit:
                raise WireError(f"the request has {request.nbytes:,} bytes where at most {limit:,} are taken")
            return self._answer(request, limit)
        except MemoryLost as error:
            self.say(str(error))
            return Packet("failure", {"reason": str(error), "lost": True}, {})
        except EquipoiseError as error:
            self.say(str(error))
            return failure(str(error))
        except Exception as error:
            self.say(f"{type(error).__name__}: {error}")
            return failure(f"{type(error).__name__}: {error}")

    def _answer(self, request: Packet, limit: int) -> Packet:
        if request.kind == "hello":
            return self._hello(request.header)
        if request.kind == "moments":
            return self._moments(request)
        desk = self._at(request.header)
        answers = {"train": desk.train, "ask": desk.ask, "score": desk.score, "resample": desk.resample}
        if request.kind == "deliver":
            return self._receive(request, desk, limit)
        if request.kind not in answers:
            raise WireError(f"the request {request.kind!r} is unknown here")
        return answers[request.kind](request, limit)

    # -- before the first round --------------------------------------------------------------------------------------
    def _hello(self, header: dict[str, Any]) -> Packet:
        """Who this is and what kind of samples it has; nothing about any one of them, nor how many there are."""
        samples = self._data(header.get("data_options", {}))
        assert samples.labels is not None
        kinds = {
            "name": self.name,
            "version": __version__,
            "shape": list(samples.x.shape[1:]),
            "dtype": str(samples.x.dtype),
            "features": list(samples.features),
        }
        if header.get("ask_classes"):
            kinds["classes"] = np.unique(samples.labels).tolist()
        return Packet("reply", kinds, {})

    def _moments(self, request: Packet) -> Packet:
        """Sums for a common scale: of the values, or given their mean of the squared distances to it."""
        agreement = self._agreed(request.header)
        x, _, _, _ = self._parts(agreement)
        mean = request.arrays.get("mean")
        totals = moments(x, mean)
        return Packet("reply", {}, totals)

    def _data(self, options: dict[str, Any]) -> Samples:
        key = json.dumps(options, sort_keys=True)
        if self._samples is None or self._samples[0] != key:
            samples = self.read(options)
            if samples.labels is None:
                raise WireError("the server names no label column: expected data.options.label in its configuration")
            self._samples = key, samples
        return self._samples[1]

    def _agreed(self, header: dict[str, Any]) -> Agreement:
        agreement = Agreement.from_dict(header["agreement"])
        if self.name not in agreement.roster:
            raise WireError(f"{self.name} is not among the sites of this run: {', '.join(agreement.roster)}")
        if ":" in agreement.model and agreement.model not in self.models:
            raise WireError(
                f"model.name = {agreement.model!r} would run code of its own at this site, which has not allowed it;"
                f" join with --allow-model {agreement.model} if you know it"
            )
        return agreement

    def _parts(self, agreement: Agreement) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Training samples and labels, then those held out."""
        samples = self._data({**agreement.data_options, "features": list(agreement.features) or None})
        found = (str(samples.x.dtype), samples.x.shape[1:])
        if found != (agreement.dtype, agreement.shape):
            raise WireError(
                f"samples here are {found[0]} {list(found[1])}, and the run is about {agreement.dtype}"
                f" {list(agreement.shape)}"
            )
        assert samples.labels is not None
        y = agreement.encode(samples.labels)
        held = holdout(y, agreement.held_out, agreement.seed, np.zeros_like(y))
        return samples.x[~held], y[~held], samples.x[held], y[held]

    def _at(self, header: dict[str, Any]) -> _Desk:
        """Everything set up for one run; made once, as long as this process lives."""
        agreement = self._agreed(header)
        if self._desk is None or self._desk.agreement != agreement:
            x, y, held_x, held_y = self._parts(agreement)
            client = agreement.roster.index(self.name)
            held = Split(torch.from_numpy(held_x), torch.from_numpy(held_y)) if len(held_y) else None
            self._desk = _Desk(agreement, client, x, y, held, self.folder / agreement.run, self.device)
        return self._desk

    # -- after the last round ----------------------------------------------------------------------------------------
    def _receive(self, request: Packet, desk: _Desk, limit: int) -> Packet:
        """The final model, with all that is needed to use it."""
        model = unpack(request, desk.model(), limit)
        predict.save(self.folder, desk.agreement.card(), {"model": {**model["params"], **model["buffers"]}})
        self.finished = self.folder / "model.safetensors"
        self.say(f"the run is finished; the model is {self.finished}")
        return Packet("reply", {}, {})


class _Desk:
    """One run at one site: the serial engine over its data, and the versions of what its methods keep."""

    def __init__(
        self,
        agreement: Agreement,
        client: int,
        x: np.ndarray,
        y: np.ndarray,
        held: Split | None,
        folder: Path,
        device: str,
    ) -> None:
        self.agreement, self.client, self.folder = agreement, client, folder
        fed = agreement.federation(x, y, client, test=held)
        self.engine = Serial(fed, device=device, precision=agreement.precision)
        self.chain = read_chain(agreement.method)
        self.params, self.buffers = self.engine.place(fed.network.params), self.engine.place(fed.network.buffers)
        self.ids = torch.tensor([client])
        self.versions = Versions(folder)
        self.raw = self.engine.offsets, self.engine.indices
        self._take_up(self._stages())

    def model(self) -> Tree:
        """What the model looks like."""
        return {"params": self.params, "buffers": self.buffers}

    # -- requests ----------------------------------------------------------------------------------------------------
    def train(self, request: Packet, limit: int) -> Packet:
        header, engine = request.header, self.engine
        chain, local = read_chain(header["method"]), read_local(header["local"])
        parts = self._unpack(request, limit)
        self._remember(header)
        task = Task(chain, engine.fed.network, local, engine.autocast)
        visit = engine.prepare(
            task,
            self.ids,
            header["round"],
            header["wave"],
            parts["params"],
            parts["shared"],
            tree.stack([parts["own"]]),
        )
        result = engine.visit(task, visit, tree.stack([parts["buffers"]]), self.ids, shared_start=True)
        engine.memory.put(self.ids, result.memory)
        if not bool(result.finite.all()):
            raise WireError("the training turned into not-a-number; try a smaller local.lr, or local.clip")
        return self._reply(
            header, summed_alone(result, visit.n, parts["buffers"]) if header["summed"] else alone(result, visit.n)
        )

    def ask(self, request: Packet, limit: int) -> Packet:
        header, engine = request.header, self.engine
        question, owner = read_question(header["question"]), header["owner"]
        parts = self._unpack(request, limit)
        self._remember(header)
        model = parts if question.needs_model else self.model()
        answers, memory = engine.answers(question, model["params"], model["buffers"], self.ids, owner, parts["msg"])
        engine.memory.put(self.ids, memory)
        return self._reply(header, {"answer": tree.rows(answers, 0)})

    def score(self, request: Packet, limit: int) -> Packet:
        question = read_question(request.header["question"])
        parts = self._unpack(request, limit)
        held = self.engine.fed.test
        if held is None:  # so few samples that none could be spared
            y = torch.zeros(0, dtype=torch.int64)
            outputs = torch.zeros(0, len(self.agreement.classes), dtype=self.engine.dtype)
            totals = question.measure(outputs, y, y.bool())
        else:
            totals = self.engine.score(question, parts["params"], parts["buffers"], held)
        return pack("reply", {}, {"answer": totals})

    def resample(self, request: Packet, limit: int) -> Packet:
        """Choose what to train on. The same request gives the same choice, and so may come again."""
        stage = int(request.header["stage"])
        (method,) = read_chain(request.header["method"])
        msg = self._unpack(request, limit)["msg"]
        self._take_up(self._stages()[:stage])
        self.engine.resample_with(method, msg)
        assert self.engine.copies is not None
        chosen = {"indices": self.engine.indices, "copies": self.engine.copies}
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stage_versions.write(Version(stage, 0), self._stage_versions.all(), chosen)
        return pack("reply", {}, {})

    # -- how it is done ----------------------------------------------------------------------------------------------
    def _unpack(self, request: Packet, limit: int) -> Tree:
        """The trees of a request. The model must be like ours; what methods send is theirs, but finite."""
        model = {"params": self.params, "buffers": self.buffers}
        names = {name.split("/")[0] for name in request.arrays}
        expected: Tree = {key: value for key, value in model.items() if key in names}
        foreign = tree.unflatten(
            {name: torch.from_numpy(a) for name, a in request.arrays.items() if name.split("/")[0] not in expected}
        )
        parts = unpack(request, expected | foreign, limit)
        blank: Tree = {m.name: {} for m in self.chain}
        return {
            "buffers": {},
            "msg": {},
            **parts,
            "shared": blank | parts.get("shared", {}),
            "own": blank | parts.get("own", {}),
        }

    def _remember(self, header: dict[str, Any]) -> None:
        """Lay out the memories of the version that the request builds on."""
        if (have := len(self._stage_versions.all())) < header["stages"]:
            raise WireError(
                f"what this site had chosen to train on is lost: {self.folder / 'data'} has {have} of"
                f" {header['stages']} choices; it takes part again when the run is resumed"
            )
        initial = self.chain.remember(self.params, len(self.agreement.classes))
        self.engine.memory = Memories(initial, len(self.agreement.roster), self.engine.memory_limit)
        self.engine.memory.load(self.versions.read(Version(*header["base"])))

    def _reply(self, header: dict[str, Any], trees: Tree) -> Packet:
        kept = self.engine.memory.save()
        if kept:
            needed = [Version(*version) for version in (header["base"], *header["needed"])]
            self.versions.write(Version(*header["version"]), needed, kept)
        return pack("reply", {"kept": bool(kept)}, trees)

    @property
    def _stage_versions(self) -> Versions:
        return Versions(self.folder / "data")

    def _stages(self) -> list[Tree]:
        return [self._stage_versions.read(version) for version in self._stage_versions.all()]

    def _take_up(self, stages: list[Tree]) -> None:
        """Train on what was chosen last."""
        self.engine.offsets, self.engine.indices = self.raw
        self.engine.copies = None
        for chosen in stages[-1:]:
            self.engine.indices, self.engine.copies = chosen["indices"], chosen["copies"]
            after = torch.arange(len(self.raw[0])) > self.client
            self.engine.offsets = after * len(chosen["indices"])


def alone(result: Result, n: Tensor) -> Tree:
    """One client's visit as it is sent."""
    numbers = {"weight": result.weight[0], "plain_weight": result.plain_weight[0], "samples": n[0]}
    parts = {"delta": result.delta, "buffers": result.buffers, "upload": result.upload}
    return {**{name: tree.rows(part, 0) for name, part in parts.items()}, "numbers": numbers}


def summed_alone(result: Result, n: Tensor, before: Tree) -> Tree:
    """The same, ready to be added to others': delta and change of the buffers come times their weights."""
    reply = summed(result, before)
    return {**reply, "numbers": {**reply["numbers"], "samples": n[0]}}


def moments(x: np.ndarray, mean: np.ndarray | None) -> dict[str, np.ndarray]:
    """Per channel or feature, in units of 255 for pixels: how many values, and their sum or squared distances."""
    unit = 255.0 if x.dtype == np.uint8 else 1.0
    total = np.zeros(x.shape[1])
    for low in range(0, len(x), 2048):
        block = np.moveaxis(x[low : low + 2048], 1, -1).reshape(-1, x.shape[1]).astype(np.float64) / unit
        total += block.sum(0) if mean is None else ((block - mean) ** 2).sum(0)
    return {"count": np.array([x.size // x.shape[1]], dtype=np.float64), "total": total}
