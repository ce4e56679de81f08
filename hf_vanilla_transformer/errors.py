"""User errors: one line on standard error and an exit status, without a traceback."""

import errno
import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something that the user can fix. The message is one line: the argument, its value, what to do."""


class Interrupted(UserError):
    """Ctrl-C, after the state was saved."""


def check_at_least_one(**values: int | None) -> None:
    """Refuse numbers below 1; None is the default of an argument.

    Raises:
        UserError: with the name and the value of the argument.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"{name}: must be at least 1, not {value}")


def run_command(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit with the status that it returns; None is 0.

    Raises:
        SystemExit: always. Status 2 after a `UserError` or a file that cannot be read or written,
            130 after Ctrl-C; any other exception is a bug and keeps its traceback.
    """
    try:
        status = main() or 0
    except UserError as error:
        status = _report(str(error), 130 if isinstance(error, Interrupted) else 2)
    except KeyboardInterrupt:
        status = _report("interrupted", 130)
    except BrokenPipeError:  # the reader closed the pipe (`… | head`), which is no error
        sys.stderr.close()
        status = 0
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EISDIR, errno.ENOTDIR, errno.EROFS):
            raise
        status = _report(str(error), 2)
    raise SystemExit(status)


def _report(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
