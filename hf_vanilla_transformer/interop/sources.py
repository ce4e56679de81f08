"""The input of a conversion as files: a file or folder, a zip archive, a name on the Hub, or an adapter of PEFT."""

import math
import re
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import Tensor

from ..utils.atomic_write import report_full_disk
from ..utils.errors import UserError
from ..utils.untrusted import one_line, read_json_object, refuse_special_files, shown
from .options import Options
from .state_dicts import STACKS, find_weights, read_torch_file, require_tensors

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: The embeddings in the files of transformers' classes.
EMBEDDINGS = ("model.shared.weight", *(f"model.{stack}.embed_tokens.weight" for stack in STACKS))
_MODEL_FILES = ("*.json", "*.txt", "*.spm", "*.model", "*.safetensors")
_OTHER_WEIGHTS = ("pytorch_model*.bin", "adapter_model.bin")
_HUB_NAME, _PARAMETER = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*"), re.compile(r".*(weight|bias)")
_MAX_EXPANSION, _MAX_MEMBERS = 20, 1000  # of a zip archive: weights hardly shrink
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
# Options of PEFT's LoRA that add something else than B A, with the values that do not.
_NOT_MERGED = {"use_dora": False, "lora_bias": False, "megatron_config": None, "trainable_token_indices": None}


@contextmanager
def local_files(source: str | Path) -> Iterator[Path]:
    """The file or folder to read: `source` itself, or a temporary folder with its content."""
    path = Path(source)
    refuse_special_files(path)
    with TemporaryDirectory() as folder:
        if path.is_file() and path.suffix == ".zip":
            path = _unzipped(path, Path(folder))
        elif not path.exists() and _HUB_NAME.fullmatch(str(source)):
            path = from_hub(str(source))
        yield _merged(path, Path(folder) / "merged") if (path / _ADAPTER).is_file() else path


def from_hub(name: str, argument: str = "") -> Path:
    """The folder of a model on the Hub, in the cache of `huggingface_hub`. `argument` is put before messages."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with report_full_disk(constants.HF_HUB_CACHE):
            folder = Path(snapshot_download(name, allow_patterns=list(_MODEL_FILES)))
            if not any(folder.glob("*.safetensors")):
                snapshot_download(name, allow_patterns=list(_OTHER_WEIGHTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"there is no such folder, and the Hub has none that can be fetched ({one_line(error)})"
        raise UserError(f"{argument}{name}: {reason}") from None
    return folder


def _unzipped(archive: Path, folder: Path) -> Path:
    """Extract plain files into `folder`. Raises a UserError for other members, and for more data than weights need."""
    try:
        with report_full_disk(folder), zipfile.ZipFile(archive) as file:
            members = [member for member in file.infolist() if not member.is_dir()]
            size = sum(member.file_size for member in members)
            if size > _MAX_EXPANSION * archive.stat().st_size or len(members) > _MAX_MEMBERS:
                raise UserError(f"{archive}: {len(members)} files of {size} bytes are too many; unzip it and look")
            for member in members:
                parts = PurePosixPath(member.filename).parts
                kind = stat.S_IFMT(member.external_attr >> 16)
                if kind not in (0, stat.S_IFREG) or ".." in parts or re.match(r"/|.*[\\:]", member.filename):
                    raise UserError(f"{archive}: {shown(member.filename)} is no file inside the archive")
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with file.open(member) as content, target.open("xb") as output:
                    shutil.copyfileobj(content, output)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{archive}: a damaged or encrypted zip archive ({one_line(error)})") from None
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else folder


def _merged(adapter: Path, folder: Path) -> Path:
    """A folder of the base model with a LoRA adapter, and with the tokenizer of the adapter if it has one."""
    options = Options(read_json_object(adapter / _ADAPTER), f"{adapter / _ADAPTER}: ")
    if options.text("peft_type") != "LORA":
        raise options.error("peft_type", "only LORA is merged")
    options.refuse({name: ((value,), "adds more than a matrix product") for name, value in _NOT_MERGED.items()})
    named = options.text("base_model_name_or_path")
    base = Path(named) if Path(named).is_dir() else from_hub(named, f"{options.where}base_model_name_or_path=")
    refuse_special_files(base)
    file = next((adapter / name for name in _ADAPTER_WEIGHTS if (adapter / name).is_file()), None)
    if file is None:
        raise UserError(f"{adapter}: there is none of {', '.join(_ADAPTER_WEIGHTS)}")
    weights = read_parts(weight_files(base), base, *EMBEDDINGS)
    merged = _with_adapter(weights, require_tensors(read_torch_file(file), str(file)), options)
    folder.mkdir()
    for source in (base, adapter):
        for path in source.glob("*"):
            if path.is_file() and path.suffix in (".json", ".txt", ".spm", ".model") and "index" not in path.name:
                shutil.copy(path, folder / path.name)
    (folder / _ADAPTER).unlink()
    save_file({name: tensor.clone().contiguous() for name, tensor in merged.items()}, folder / "model.safetensors")
    return folder


def _with_adapter(weights: dict[str, Tensor], adapter: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """W + scale B A for each pair of matrices, and the tensors that the adapter has whole."""
    merged, parts = dict(weights), {}
    for name, tensor in adapter.items():
        name = re.sub(r"\.(modules_to_save|default)\b", "", name.removeprefix("base_model.model."))
        parts[name] = tensor
        match = re.fullmatch(r"(.*)\.lora_(?:embedding_)?[AB](?:\.weight)?", name)
        target = f"{match[1]}.weight" if match else name
        if target not in weights:
            raise UserError(f"{options.where}the base model has no tensor {shown(target)}")
        if match is None:
            merged[name] = tensor
    for name in (name for name in parts if re.search(r"\.lora_(embedding_)?A", name)):
        module, is_embedding = name.partition(".lora_")[0], ".lora_embedding" in name
        target, other = f"{module}.weight", parts.get(re.sub(r"(\.lora_(?:embedding_)?)A", r"\1B", name))
        try:
            delta = other.float() @ parts[name].float() * _scale(module, options)  # type: ignore[union-attr]
            delta = delta.T if is_embedding else delta
            merged[target] = (weights[target].float() + delta).to(weights[target].dtype)
        except (RuntimeError, AttributeError) as error:
            raise UserError(f"{options.where}{shown(name)} does not fit the base model ({one_line(error)})") from None
    return merged


def _scale(module: str, options: Options) -> float:
    """The factor of B A in a module: alpha / r, or alpha / sqrt(r)."""
    values = {name: options.values.get(name) for name in ("r", "lora_alpha")}
    for name, pattern in zip(values, ("rank_pattern", "alpha_pattern"), strict=True):
        for key, value in options.section(pattern).values.items():
            if f".{module}".endswith(f".{key}"):
                values[name] = value
    numbers = Options(values, options.where)
    rank = numbers.integer("r", 8, 1)
    return numbers.number("lora_alpha", 8) / (math.sqrt(rank) if options.flag("use_rslora") else rank)


def weight_files(folder: Path) -> list[Path]:
    """One file of weights, or those that an index names."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            parts = read_json_object(folder / f"{name}.index.json").get("weight_map")
            names = set(parts.values()) if isinstance(parts, Mapping) else set()
            if not names or not all(isinstance(part, str) and Path(part).name == part for part in names):
                raise UserError(f"{folder / name}.index.json is damaged: file names are needed under weight_map")
            return [folder / part for part in sorted(names)]
    raise UserError(f"{folder}: no weights: there is none of {', '.join(WEIGHTS)}")


def read_parts(files: Iterable[Path], folder: Path, *known: str) -> dict[str, Tensor]:
    """The tensors of several files. `known` names are as in `require_tensors`."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        part = find_weights(read_torch_file(file), lambda names: any(map(_PARAMETER.fullmatch, names)), str(file))
        if twice := sorted(tensors.keys() & part.keys()):
            raise UserError(f"{file}: {shown(twice[0])} is also in a file before it")
        tensors |= part
    return require_tensors(tensors, str(folder), *known)
