"""The `dtrain` command, also as `python -m dtrain`: signals are caught before anything heavy is imported."""

import sys

from dtrain.core import signals


def main() -> None:
    """Run the command line and end the process."""
    run = next((word for word in sys.argv[1:] if not word.startswith("-")), "") == "run"
    signals.listen(run=run)
    from dtrain.cli import app

    try:
        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if run or code == signals.ABORTED:
            signals.end(code)
        raise


if __name__ == "__main__":
    main()
