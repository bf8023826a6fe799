"""Makes `python -m equipoise.cli` run the command line."""

from equipoise.cli import main

if __name__ == "__main__":
    main()
