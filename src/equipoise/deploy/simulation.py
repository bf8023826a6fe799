"""The same server and sites in Flower's own simulation, for a cluster that has Ray.

The settings of the two apps come from Flower's run configuration: `config`, the TOML file; `sites`, a folder with one
file of samples for each site; `out`, the run folder. Every machine of the cluster must be able to read these files.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from equipoise.core import expression
from equipoise.core.errors import ConfigError
from equipoise.deploy import server as server_half
from equipoise.deploy.site import Site, reading
from equipoise.deploy.transport import relay
from equipoise.methods.registry import parse
from equipoise.runs.config import Config, load_config
from equipoise.runs.folder import RunFolder
from equipoise.runs.run import Watch

client = ClientApp()
server = ServerApp()


@client.train()
@client.query()
def answer(message: Message, context: Context) -> Message:
    """Answer for the site with the number that Flower has given to this node."""
    file = _files(context)[int(context.node_config["partition-id"])]
    site = _site(file, _path(context, "out") / "sites" / file.stem, _path(context, "config"))
    return relay.answer(message, site.answer)


@server.main()
def main(grid: Grid, context: Context) -> None:
    names = [file.stem for file in _files(context)]
    config, out = load_config(_path(context, "config")), _path(context, "out")
    config = config.model_copy(update={"deploy": config.deploy.model_copy(update={"sites": names})})
    server_half.check(config)
    with _folder(out, config) as folder:
        server_half.train(config, folder, relay.GridCarrier(grid), None, Watch(notify=print))


def _folder(out: Path, config: Config) -> RunFolder:
    """The run folder; if it holds a run already, that run goes on."""
    return RunFolder.open(out) if (out / "config.json").exists() else RunFolder.create(out, config.to_dict())


@lru_cache(maxsize=64)
def _site(file: Path, folder: Path, config: Path) -> Site:
    """The site of a file. A process of Ray keeps the sites that it has answered for.

    All sites belong to the user who wrote the config, so they allow the model and the methods that it names.
    """
    named = load_config(config)
    methods = expression.names(str(parse(named.method)))
    return Site(file.stem, reading(file), folder, models=(named.model.name,), methods=tuple(methods))


def _files(context: Context) -> list[Path]:
    folder = _path(context, "sites")
    files = sorted(file for file in folder.glob("*") if file.suffix in (".csv", ".npz", ".parquet"))
    if not files:
        raise ConfigError(f"sites = {str(folder)!r}: the folder has no .csv, .npz or .parquet file")
    return files


def _path(context: Context, key: str) -> Path:
    return Path(str(context.run_config[key])).expanduser()
