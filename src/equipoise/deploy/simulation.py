"""The same server and the same sites in Flower's own simulation, for a cluster that has Ray.

The apps point at files that every machine of the cluster can read. Their settings come from the run's configuration:
`config`, the TOML file; `sites`, a folder with a file of samples for each site; `out`, the folder of the run.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from equipoise.config import Config, load_config
from equipoise.deploy import relay
from equipoise.deploy import server as half
from equipoise.deploy.site import Site, reading
from equipoise.errors import ConfigError
from equipoise.folder import RunFolder
from equipoise.runs import Watch

client = ClientApp()
server = ServerApp()


@client.train()
@client.query()
def answer(message: Message, context: Context) -> Message:
    """An actor answers for the site whose number Flower gives it."""
    file = _files(context)[int(context.node_config["partition-id"])]
    return relay.answer(message, _site(file, _path(context, "out") / "sites" / file.stem).answer)


@server.main()
def main(grid: Grid, context: Context) -> None:
    names = [file.stem for file in _files(context)]
    config, out = load_config(_path(context, "config")), _path(context, "out")
    config = config.model_copy(update={"deploy": config.deploy.model_copy(update={"sites": names})})
    half.check(config)
    with _folder(out, config) as folder:
        half.train(config, folder, relay.GridCarrier(grid), None, Watch(say=print))


def _folder(out: Path, config: Config) -> RunFolder:
    """A run that was cut off goes on."""
    return RunFolder.open(out) if (out / "config.json").exists() else RunFolder.create(out, config.to_dict())


@lru_cache(maxsize=64)
def _site(file: Path, folder: Path) -> Site:
    """A site stays in the memory of the actor that has answered for it."""
    return Site(file.stem, reading(file), folder)


def _files(context: Context) -> list[Path]:
    folder = _path(context, "sites")
    files = sorted(file for file in folder.glob("*") if file.suffix in (".csv", ".npz", ".parquet"))
    if not files:
        raise ConfigError(f"sites = {str(folder)!r}: there is no .csv, .npz or .parquet file")
    return files


def _path(context: Context, key: str) -> Path:
    return Path(str(context.run_config[key])).expanduser()
