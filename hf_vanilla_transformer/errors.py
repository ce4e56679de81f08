"""The one way in which a user's mistake reaches the user: a single line, without a traceback."""

import errno
import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something the user can mend. The message is one line: the argument, its value, what to do."""


class Interrupted(UserError):
    """Ctrl-C, after everything that should be kept was saved."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and leave with its exit status.

    Args:
        main: the command; returns an exit status or None (= 0).

    Raises:
        SystemExit: always. Status 2 after a `UserError` or a file that cannot be read or written,
            130 after Ctrl-C; any other exception is a fault of ours and keeps its traceback.
    """
    try:
        status = main() or 0
    except UserError as error:
        status = _complain(str(error), 130 if isinstance(error, Interrupted) else 2)
    except KeyboardInterrupt:
        status = _complain("interrupted", 130)
    except BrokenPipeError:  # the reader of our pipe has left (`… | head`): nothing to complain about
        sys.stderr.close()
        status = 0
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EISDIR, errno.ENOTDIR, errno.EROFS):
            raise
        status = _complain(str(error), 2)
    raise SystemExit(status)


def _complain(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
