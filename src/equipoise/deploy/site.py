"""The client half of a run with real sites: one site answers each request of the server with a reply.

A site runs the same taps as a simulation: it uses the serial engine over a federation in which all other clients
are empty. A site checks every request before it acts on it. If it cannot do what a request asks, its reply says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import __version__
from equipoise.core import tree
from equipoise.core.client import Task
from equipoise.core.errors import EquipoiseError, NotAllowed
from equipoise.core.federation import Split
from equipoise.core.sums import Result, summed
from equipoise.core.tree import Tree
from equipoise.data.holdout import holdout
from equipoise.data.samples import Samples, read_samples
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.packets import check_model, pack, read_chain, read_local, read_question, unpack
from equipoise.deploy.transport.wire import LIMIT, Packet, WireError, printable
from equipoise.deploy.versions import MemoryLost, Version, Versions
from equipoise.engines.memory import Memories
from equipoise.engines.serial import Serial
from equipoise.runs import predict

Reader = Callable[[dict[str, Any]], Samples]  # reads the samples with the server's options: the label column, ...


def reading(path: Path) -> Reader:
    """A function that reads the samples of this file or folder."""

    def read(options: dict[str, Any]) -> Samples:
        columns = options.get("columns")
        return read_samples(path, **{**options, "columns": None if columns is None else tuple(columns)})

    return read


class Site:
    """One site of a federation.

    `folder` holds what the methods keep at this site and, after the run, the model. `models` and `methods` are the
    names of code outside Equipoise that the server may run here, such as `package.module:Class`.
    """

    def __init__(
        self,
        name: str,
        read: Reader,
        folder: Path,
        *,
        device: str = "cpu",
        models: tuple[str, ...] = (),
        methods: tuple[str, ...] = (),
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.name, self.read, self.folder = name, read, folder
        self.device, self.models, self.methods, self.say = device, models, methods, say
        self.finished: Path | None = None  # the file of the final model, once the server has sent the model
        self._samples: tuple[str, Samples] | None = None  # the options they were read with, and the samples
        self._run: _SiteRun | None = None

    @torch.no_grad()
    def answer(self, request: Packet, limit: int = LIMIT) -> Packet:
        """The reply to a request; if the site cannot do what the request asks, a failure with the reason."""
        try:
            if request.nbytes > limit:
                raise WireError(f"the request has {request.nbytes:,} bytes, expected at most {limit:,}")
            return self._answer(request, limit)
        except MemoryLost as error:
            return self._failure(str(error), lost=True)
        except NotAllowed as error:
            # Only the operator of this site can change this, by joining again: the server need not ask again.
            return self._failure(str(error), final=True)
        except EquipoiseError as error:
            return self._failure(str(error))
        except Exception as error:
            return self._failure(f"{type(error).__name__}: {error}")

    def _failure(self, reason: str, **marks: bool) -> Packet:
        """Tell the operator of this site and the server why a request failed."""
        reason = printable(reason)  # it may quote the server
        self.say(reason)
        return Packet("failure", {"reason": reason, **marks}, {})

    def _answer(self, request: Packet, limit: int) -> Packet:
        if request.kind == "hello":
            return self._hello(request.header)
        if request.kind == "moments":
            return self._moments(request)
        run = self._run_for(request.header)
        answers = {
            "train": run.train,
            "ask": run.ask,
            "trial": run.trial,
            "score": run.score,
            "resample": run.resample,
        }
        if request.kind == "deliver":
            return self._receive_model(request, run, limit)
        if request.kind not in answers:
            raise WireError(f"the request {request.kind!r} is unknown here")
        return answers[request.kind](request, limit)

    # -- before the first round --------------------------------------------------------------------------------------
    def _hello(self, header: dict[str, Any]) -> Packet:
        """The name of the site and the kind of its samples, but not how many samples it has, nor any of them."""
        samples = self._data(header.get("data_options", {}))
        assert samples.labels is not None
        kinds = {
            "name": self.name,
            "version": __version__,
            "shape": list(samples.x.shape[1:]),
            "dtype": str(samples.x.dtype),
            "columns": list(samples.columns),
        }
        if header.get("ask_classes"):
            kinds["classes"] = np.unique(samples.labels).tolist()
        return Packet("reply", kinds, {})

    def _moments(self, request: Packet) -> Packet:
        """The sums from which the server computes the common mean or, once it has sent the mean, the variance."""
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
        """The agreement in a request, once it is known that this site is part of the run and allows its code."""
        agreement = Agreement.from_dict(header["agreement"])
        if self.name not in agreement.roster:
            raise WireError(f"{self.name} is not among the sites of this run: {', '.join(agreement.roster)}")
        check_model(agreement.model, self.models)
        # This also imports the modules of allowed methods, so that `read_question` knows their questions.
        read_chain(agreement.method, self.methods)
        return agreement

    def _parts(self, agreement: Agreement) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The training samples and their labels, then the held-out samples and their labels."""
        samples = self._data({**agreement.data_options, "columns": list(agreement.columns) or None})
        found = (str(samples.x.dtype), samples.x.shape[1:])
        if found != (agreement.dtype, agreement.shape):
            raise WireError(
                f"the samples of this site are {found[0]} {list(found[1])}, but those of the run are"
                f" {agreement.dtype} {list(agreement.shape)}"
            )
        assert samples.labels is not None
        y = agreement.encode(samples.labels)
        held = holdout(y, agreement.held_out, agreement.seed, np.zeros_like(y))
        return samples.x[~held], y[~held], samples.x[held], y[held]

    def _run_for(self, header: dict[str, Any]) -> _SiteRun:
        """The run that a request belongs to; it is set up once and kept as long as this process lives."""
        agreement = self._agreed(header)
        if self._run is None or self._run.agreement != agreement:
            x, y, held_x, held_y = self._parts(agreement)
            client = agreement.roster.index(self.name)
            held = Split(torch.from_numpy(held_x), torch.from_numpy(held_y)) if len(held_y) else None
            folder = self.folder / agreement.run
            self._run = _SiteRun(agreement, client, x, y, held, folder, self.device, self.methods)
        return self._run

    # -- after the last round ----------------------------------------------------------------------------------------
    def _receive_model(self, request: Packet, run: _SiteRun, limit: int) -> Packet:
        """Save the final model, with everything that is needed to use it."""
        model = unpack(request, run.model(), limit)
        predict.save(self.folder, run.agreement.card(), {"model": {**model["params"], **model["buffers"]}})
        self.finished = self.folder / "model.safetensors"
        self.say(f"the run is finished; the model is {self.finished}")
        return Packet("reply", {}, {})


class _SiteRun:
    """One run at one site: the serial engine over the site's data, and the versions of what its methods keep."""

    def __init__(
        self,
        agreement: Agreement,
        client: int,
        x: np.ndarray,
        y: np.ndarray,
        held: Split | None,
        folder: Path,
        device: str,
        methods: tuple[str, ...],
    ) -> None:
        self.agreement, self.client, self.folder, self.methods = agreement, client, folder, methods
        fed = agreement.federation(x, y, client, test=held)
        self.engine = Serial(fed, device=device, precision=agreement.precision)
        self.chain = read_chain(agreement.method, methods)
        self.params, self.buffers = self.engine.place(fed.network.params), self.engine.place(fed.network.buffers)
        self.ids = torch.tensor([client])
        self.versions = Versions(folder)
        self.raw = self.engine.offsets, self.engine.indices
        self._use_last_choice(self._choices())

    def model(self) -> Tree:
        """Tensors with the shapes and types of the model."""
        return {"params": self.params, "buffers": self.buffers}

    # -- requests ----------------------------------------------------------------------------------------------------
    def train(self, request: Packet, limit: int) -> Packet:
        header, engine = request.header, self.engine
        chain, local = read_chain(header["method"], self.methods), read_local(header["local"])
        parts = self._unpack(request, limit)
        self._load_memories(header)
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
        if header["summed"]:
            return self._reply(header, weighted_visit(result, visit.n, parts["buffers"]))
        return self._reply(header, single_visit(result, visit.n))

    def ask(self, request: Packet, limit: int) -> Packet:
        header, engine = request.header, self.engine
        question, owner = read_question(header["question"]), header["owner"]
        parts = self._unpack(request, limit)
        self._load_memories(header)
        model = parts if question.needs_model else self.model()
        answers, memory = engine.answers(question, model["params"], model["buffers"], self.ids, owner, parts["msg"])
        engine.memory.put(self.ids, memory)
        return self._reply(header, {"answer": tree.rows(answers, 0)})

    def trial(self, request: Packet, limit: int) -> Packet:
        """Try the model, as this site uses it itself, on the samples that it holds out or, where the sites of the run
        hold out none, on its training samples. What methods keep stays as it is."""
        question = read_question(request.header["question"])
        parts = self._unpack(request, limit)
        self._load_memories(request.header)
        engine, held, model = self.engine, self.engine.fed.test, (parts["params"], parts["buffers"])
        if not self.agreement.held_out:
            answer = engine.trial(question, *model, self.chain)
        elif held is not None:
            x, y = held.x.to(engine.device), held.y.to(engine.device)
            every = torch.ones_like(y, dtype=torch.bool)
            answers = engine.tried(question, *model, self.chain, self.ids, x[None], y[None], every[None])
            answer = tree.rows(answers, 0)
        else:  # this site has so few samples that none is held out, and adds nothing to the sum
            answer = tree.zeros(engine.trial(question, *model, self.chain))
        return pack("reply", {}, {"answer": answer})

    def score(self, request: Packet, limit: int) -> Packet:
        question = read_question(request.header["question"])
        parts = self._unpack(request, limit)
        held = self.engine.fed.test
        if held is None:  # this site has so few samples that none is held out
            y = torch.zeros(0, dtype=torch.int64)
            outputs = torch.zeros(0, len(self.agreement.classes), dtype=self.engine.dtype)
            totals = question.measure(outputs, y, y.bool())
        else:
            totals = self.engine.score(question, parts["params"], parts["buffers"], held)
        return pack("reply", {}, {"answer": totals})

    def resample(self, request: Packet, limit: int) -> Packet:
        """Choose the samples to train on. A repeated request gives the same choice, so the server may ask again."""
        stage = int(request.header["stage"])
        (method,) = read_chain(request.header["method"], self.methods)
        msg = self._unpack(request, limit)["msg"]
        self._use_last_choice(self._choices()[:stage])
        self.engine.resample_with(method, msg)
        assert self.engine.copies is not None
        chosen = {"indices": self.engine.indices, "copies": self.engine.copies}
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._choice_versions.write(Version(stage, 0), self._choice_versions.all(), chosen)
        return pack("reply", {}, {})

    # -- what the requests have in common ----------------------------------------------------------------------------
    def _unpack(self, request: Packet, limit: int) -> Tree:
        """The trees of a request. The model must match ours; what methods send has any structure, but is finite."""
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

    def _load_memories(self, header: dict[str, Any]) -> None:
        """Give the engine the memories of the version that the request builds on."""
        if (have := len(self._choice_versions.all())) < header["stages"]:
            raise WireError(
                f"this site has lost its choice of training samples: {self.folder / 'data'} has {have} of"
                f" {header['stages']} choices; the site takes part again when the run is resumed"
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
    def _choice_versions(self) -> Versions:
        return Versions(self.folder / "data")

    def _choices(self) -> list[Tree]:
        """The choices of training samples so far: one for each time that a method has resampled."""
        return [self._choice_versions.read(version) for version in self._choice_versions.all()]

    def _use_last_choice(self, choices: list[Tree]) -> None:
        """Train on the samples of the last choice, or on all samples if there is none."""
        self.engine.offsets, self.engine.indices = self.raw
        self.engine.copies = None
        for chosen in choices[-1:]:
            self.engine.indices, self.engine.copies = chosen["indices"], chosen["copies"]
            after = torch.arange(len(self.raw[0])) > self.client
            self.engine.offsets = after * len(chosen["indices"])


def single_visit(result: Result, n: Tensor) -> Tree:
    """The reply to a request to train, where the server must see the visit of each client on its own."""
    numbers = {"weight": result.weight[0], "plain_weight": result.plain_weight[0], "samples": n[0]}
    parts = {"delta": result.delta, "buffers": result.buffers, "upload": result.upload}
    return {**{name: tree.rows(part, 0) for name, part in parts.items()}, "numbers": numbers}


def weighted_visit(result: Result, n: Tensor, before: Tree) -> Tree:
    """The same reply where the server only adds up: the delta and the change of the buffers are multiplied by their
    weights."""
    reply = summed(result, before)
    return {**reply, "numbers": {**reply["numbers"], "samples": n[0]}}


def moments(x: np.ndarray, mean: np.ndarray | None) -> dict[str, np.ndarray]:
    """Per channel or feature: the number of values, and their sum or, given the mean, the sum of the squared
    distances from it. Pixels are divided by 255."""
    unit = 255.0 if x.dtype == np.uint8 else 1.0
    total = np.zeros(x.shape[1])
    for low in range(0, len(x), 2048):
        block = np.moveaxis(x[low : low + 2048], 1, -1).reshape(-1, x.shape[1]).astype(np.float64) / unit
        total += block.sum(0) if mean is None else ((block - mean) ** 2).sum(0)
    return {"count": np.array([x.size // x.shape[1]], dtype=np.float64), "total": total}
