"""`python -m gptj_ft` is `gptj-ft`: signals are taken care of first, for the libraries take a while to load."""

from __future__ import annotations

import sys

from gptj_ft.system.signals import StopRequest, ignore_signals


def main() -> None:
    """Run the command line."""
    stop = StopRequest()
    try:
        stop.take()
        from gptj_ft.cli.app import main as run

        run()
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, KeyboardInterrupt) and not stop.has_become(error):
            raise
        print("gptj-ft: stopped before anything was done", file=sys.stderr)
        sys.exit(130)
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
