"""Rules for the code that travels with a checkpoint: `violations` reads the text of one file.

The rules are those of CONTRIBUTING, "The bundle". They look at syntax, so a determined author can evade them. They are
there for the honest one.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PACKAGE = "hf_vanilla_transformer"
SUFFIX = "_vanilla_transformer"
THIRD_PARTY = {"torch", "transformers", "safetensors", "tokenizers"}
INTERNALS = {"_dynamo", "_inductor", "_C", "_functorch", "_export"}
INTERNAL = re.compile(r"\btorch\._|\btorch\.ops\b|\b_dynamo\b|\b_inductor\b")
CODE_OBJECTS = {
    "__code__",
    "__globals__",
    "__closure__",
    "FunctionType",
    "CodeType",
    "exec",
    "eval",
}
CACHES = {"cache", "lru_cache"}
# Calls whose results do not change, so that a module may keep them.
IMMUTABLE_CALLS = _words(
    "TypeVar NewType frozenset tuple float int OutputRecorder get_logger getLogger"
)
# Calls whose results do, also in the body of a class.
MUTABLE_CALLS = _words(
    """
    dict list set bytearray defaultdict OrderedDict Counter deque count cycle local WeakKeyDictionary
    WeakValueDictionary WeakSet Lock RLock Semaphore Condition ContextVar
    """
)
MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTATORS = _words(
    """
    append extend insert pop popitem clear update setdefault add discard remove sort reverse appendleft __setitem__
    __delitem__
    """
)
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*|__all__")

# State that the bundle keeps, because it belongs to the process.
PERMITTED_STATE = {
    "_WITHOUT_CUDNN": "counts the threads inside a context that switches a flag of torch",
}

# Private names of other objects that the bundle reads or sets, because the libraries have no public ones.
PERMITTED_PRIVATE = {
    "_attn_implementation": "the attention that `set_attn_implementation` chose",
    "_commit_hash": "of the revision that a pipeline loads",
    "_from_model_config": "set to False, so that `generate` does not make the generation config anew",
    "_generation_config": "the field of the mixin's own property `generation_config`",
    "_get_resized_embeddings": "called by the override of `resize_token_embeddings`",
    "_get_resized_lm_head": "likewise",
    "_registered_impl": "the documented attribute of custom pipelines, which `save_pretrained` writes",
    "_tied_weights_keys": "a subclass declares them",
    "_replace": "documented method of named tuples",
    "_fields": "documented attribute of named tuples",
}

Found = Iterator[tuple[ast.AST, str]]


def violations(source: str) -> list[str]:
    """Every violation in the text of a file, as "line N: what", in the order of the lines."""
    tree = ast.parse(source)
    checks = (
        _imports,
        _private_names,
        _private_attributes,
        _code_objects,
        _module_state,
        _mutations,
    )
    found = {
        (getattr(node, "lineno", 1), message) for check in checks for node, message in check(tree)
    }
    return [f"line {line}: {message}" for line, message in sorted(found)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _imported(tree: ast.Module) -> dict[str, tuple[ast.AST, str]]:
    """name that an import binds -> (the import, the dotted name it stands for)"""
    bound: dict[str, tuple[ast.AST, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = node, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = _module(node)
            for alias in node.names:
                bound[alias.asname or alias.name] = node, f"{module}.{alias.name}"
    return bound


def _module(node: ast.ImportFrom) -> str:
    return "." * node.level + (node.module or "")


def _imports(tree: ast.Module) -> Found:
    """Imports that a user of remote code does not have, or that transformers' text search does not follow."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [_module(node)]
        else:
            modules = []
        for module in modules:
            root = module.split(".")[0]
            if module.startswith("."):
                if not re.fullmatch(rf"\.\w+{SUFFIX}", module):
                    yield node, f"relative import of {module}, which is no sibling in the bundle"
            elif root == "__future__":
                yield node, "from __future__: it switches off the type checks of @strict"
            elif root == PACKAGE:
                yield node, f"absolute import of the package itself: {module}"
            elif root not in THIRD_PARTY and root not in sys.stdlib_module_names:
                yield node, f"import of {root}, which a checkpoint must not need"
        name = _called(node) if isinstance(node, ast.Call) else ""
        if name in ("import_module", "__import__"):
            yield node, f"dynamic import: {name}"


def _private_names(tree: ast.Module) -> Found:
    """Private names and operators of torch, transformers and the other libraries."""
    libraries = {}
    for name, (node, what) in _imported(tree).items():
        root, *parts = what.split(".")
        if root not in THIRD_PARTY:
            continue
        libraries[name] = what
        if private := list(filter(_is_private, parts)):
            yield node, f"private name of {root}: {what} ({private[0]})"
        if what.startswith("torch.ops"):
            yield node, f"private operators: {what}"
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if accessed := _accessed(node):
            owner, name = accessed
            base, attributes = _chain(owner)
            what = ".".join([libraries.get(base or "", ""), *attributes, name])
            library = what.split(".")[0]
            if library and _is_private(name):
                yield node, f"private name of {library}: {what}"
            elif what == "torch.ops":
                yield node, f"private operators: {what}"
            elif name in INTERNALS:
                yield node, f"internals: {name}"
        elif (
            isinstance(node, ast.Constant)
            and id(node) not in docstrings
            and INTERNAL.search(str(node.value))
        ):
            yield node, f"internals in a string: {node.value[:60]!r}"


def _accessed(node: ast.AST) -> tuple[ast.AST, str] | None:
    """The owner and the name of an attribute, as in `a.b` and `getattr(a, "b")`."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if (
        isinstance(node, ast.Call)
        and _called(node) in ("getattr", "setattr", "hasattr")
        and len(node.args) > 1
    ):
        owner, name, *_ = node.args
        if isinstance(name, ast.Constant):
            return owner, str(name.value)
    return None


def _private_attributes(tree: ast.Module) -> Found:
    """Private attributes that the file does not define itself, of any object."""
    imported = _imported(tree)
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        if isinstance(node, ast.ClassDef):
            own |= {target.id for target in _targets(node.body) if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        accessed = _accessed(node)
        if accessed is None:
            continue
        owner, name = accessed
        if isinstance(node, ast.Attribute) and _chain(owner)[0] in imported:
            continue  # `_private_names` judges it
        if name in CODE_OBJECTS and isinstance(node, ast.Call):
            yield node, f"code object: {name}"
        elif _is_private(name) and name not in own and name not in PERMITTED_PRIVATE:
            yield node, f"private attribute: {name}"


def _targets(statements: Iterable[ast.stmt]) -> list[ast.expr]:
    """What these statements assign to."""
    targets: list[ast.expr] = []
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets += statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets.append(statement.target)
    return targets


def _code_objects(tree: ast.Module) -> Found:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and node.attr not in (
            "exec",
            "eval",
        ):  # `model.eval()` is another thing
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        for name in CODE_OBJECTS.intersection(names):
            yield node, f"code object: {name}"


def _module_state(tree: ast.Module) -> Found:
    """Objects at module level that can change, and caches, which are such objects."""
    for statement in _level(tree.body):
        yield from _kept(statement, in_class=False)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in _level(node.body):
                yield from _kept(statement, in_class=True)
        elif isinstance(node, ast.Global):
            yield node, f"global {', '.join(node.names)}"
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in CACHES
            and _chain(node)[0] == "functools"
        ):
            yield node, f"process-wide cache: functools.{node.attr}"
    for node, what in _imported(tree).values():
        if what.removeprefix("functools.") in CACHES:
            yield node, f"process-wide cache: {what}"


def _level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those within `if`, `try`, `with` and loops."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from _level(getattr(statement, inner, []))
            for handler in getattr(statement, "handlers", []):
                yield from _level(handler.body)


def _kept(statement: ast.stmt, in_class: bool) -> Found:
    """The value that an assignment at the level of a module or class keeps, if it can change."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return
    targets = _targets([statement])
    names = list(map(ast.unparse, targets))
    if names[0] in PERMITTED_STATE:
        return
    for value in ast.walk(statement.value):
        if isinstance(value, ast.Call):
            call = _called(value)
            if call in MUTABLE_CALLS or not (in_class or call in IMMUTABLE_CALLS):
                yield statement, f"module-level state: {names[0]} = {call}(…)"
    if in_class or all(isinstance(target, ast.Attribute) for target in targets):
        return  # such as Hugging Face's `_tied_weights_keys`
    if isinstance(statement.value, MUTABLE_DISPLAYS) and not all(
        CONSTANT.fullmatch(name) for name in names
    ):
        kind = type(statement.value).__name__.lower()
        yield statement, f"module-level state: {names[0]} is a {kind}, not a CONSTANT"


def _mutations(tree: ast.Module) -> Found:
    """Changes of constants, and of attributes of other modules, classes and functions.

    A statement at module level may complete what the file itself defines: `Class.attribute = value`.
    """
    targets = _targets(_level(tree.body))
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    own |= {target.id for target in targets if isinstance(target, ast.Name)}
    completed = {
        id(target)
        for target in targets
        if isinstance(target, ast.Attribute) and _chain(target)[0] in own
    }
    shared = own | set(_imported(tree))
    for node in ast.walk(tree):
        changed: ast.AST | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            changed = None if id(node) in completed else node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
        ):
            owner = (
                node.func.value
            )  # `torch.add` is a function of a module, `LIST.append` changes LIST
            changed = (
                None if isinstance(owner, ast.Name) and not CONSTANT.fullmatch(owner.id) else owner
            )
        elif isinstance(node, ast.Call) and _called(node) in ("setattr", "delattr") and node.args:
            changed = node.args[0]
        elif isinstance(node, ast.AugAssign):
            changed = node.target
        root = _chain(changed)[0] if changed is not None else None
        if root is not None and root in shared:
            yield node, f"changes {root}, which the whole process shares"


def _called(node: ast.Call) -> str:
    """The last part of a called name."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _chain(node: ast.AST) -> tuple[str | None, list[str]]:
    """`a.b[0].c` -> ("a", ["b", "c"]). No name where the expression begins with anything but a name."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else None), attributes
