"""The command line. `main` is the console script; it imports the commands only when it runs."""


def main() -> None:
    """Run a command. A user's mistake is printed as one sentence, with exit code 2."""
    from rich.console import Console
    from rich.markup import escape

    from equipoise.core.errors import EquipoiseError

    console = Console(stderr=True)
    try:
        from equipoise.cli.commands import app

        app()
    except EquipoiseError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        console.print("stopped; `equipoise resume FOLDER` goes on from the last checkpoint")
        raise SystemExit(130) from None
