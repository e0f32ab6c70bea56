"""Shapes of tiles in Triton and Gluon kernels, worked out from their source alone; and the tiles without a comment.

`unmarked` runs every kernel on shapes in place of tensors. A shape is a tuple of the names of its sides, () a scalar.
A loop runs once and both ways of an `if` run, since neither changes a shape.
"""

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REDUCTIONS = {"sum", "max", "min"}
BROADCASTS = {"where", "maximum", "minimum", "load", "exp", "exp2", "log", "log2", "cdiv", "zeros_like", "abs", "sqrt"}
SAME = {"convert_layout", "cumsum", "multiple_of"}
SCALARS = {"program_id", "num_programs", "pointer_type", "static_range", "static_assert", "store", "warp_specialize"}
SCALARS |= {"atomic_add", "atomic_max"}
OPERATOR_NAMES = {ast.FloorDiv: "//", ast.Mult: "*", ast.Add: "+", ast.Sub: "-"}
OPERATORS = (ast.BinOp, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp)


class Memory(tuple):
    """The shape of a tile in shared memory."""


class Several(list):
    """What a tuple holds, or a NamedTuple; `names` of its fields."""

    names: tuple[str, ...] = ()


def broadcast(shapes: list) -> tuple[str, ...]:
    """The shape of a result of tiles that broadcast: sides of 1, and those that are missing in front, give way."""
    shapes = [shape for shape in shapes if type(shape) is tuple]
    joined = ("1",) * max(map(len, shapes), default=0)
    for shape in shapes:
        padded = ("1",) * (len(joined) - len(shape)) + shape
        joined = tuple(new if old == "1" else old for old, new in zip(joined, padded, strict=True))
    return joined


class Module:
    """One source: its kernels, its NamedTuples, and what its names stand for."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        self.kernels: dict[str, ast.FunctionDef] = {}
        self.tuples: dict[str, tuple[str, ...]] = {}
        self.imported: dict[str, str] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each).split("(")[0] in ("triton.jit", "gluon.jit") for each in node.decorator_list
            ):
                self.kernels[node.name] = node
            elif isinstance(node, ast.ClassDef):
                fields = [line.target.id for line in node.body if isinstance(line, ast.AnnAssign)]
                self.tuples[node.name] = tuple(fields)
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}


class Shapes:
    """Shapes of what each statement of some modules assigns: `found[module, line]`, by the column of the name."""

    def __init__(self, modules: dict[str, Module]):
        self.modules = modules
        self.found: dict[tuple[str, int], dict[int, set]] = defaultdict(lambda: defaultdict(set))
        self.called: set[str] = set()
        self.known: dict[str, object] = {}
        # Kernels that others call come with these; the rest are launched, on pointers and numbers.
        for launched in (True, False):
            for module in modules.values():
                for kernel in module.kernels.values():
                    is_called = kernel.name.startswith("_") or f"{module.name}.{kernel.name}" in self.called
                    if not is_called and launched == kernel.name.endswith("_kernel"):
                        self.run(module, kernel, [()] * len(kernel.args.args))

    def run(self, module: Module, kernel: ast.FunctionDef, given: list, sides: list[str] = ()) -> object:
        """What a kernel returns for these arguments, which as sides of a tile have these names."""
        self.called.add(f"{module.name}.{kernel.name}")
        names = [argument.arg for argument in kernel.args.args]
        sides = {name: side for name, side in zip(names, sides, strict=False) if name.isupper() and side.isidentifier()}
        key = f"{module.name}.{kernel.name}{given!r}{sides!r}"
        if key not in self.known:
            self.known[key] = ()
            given = given + [()] * (len(names) - len(given))
            body = Body(self, module, dict(zip(names, given, strict=True)), sides)
            self.known[key] = body.of(kernel.body)
        return self.known[key]


class Body:
    """One call of a kernel: the shape of each of its names."""

    def __init__(self, shapes: Shapes, module: Module, names: dict[str, object], sides: dict[str, str]):
        self.shapes, self.module, self.names, self.returned = shapes, module, names, ()
        self.known_sides = sides  # of constants that stand for a side of another name

    def of(self, statements: list[ast.stmt]) -> object:
        for statement in statements:
            self.statement(statement)
        return self.returned

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            self.assign(node, node.targets[0], value)
        elif isinstance(node, ast.AnnAssign):
            if isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript) or node.target.id == "ROWS":
                self.known_sides[node.target.id] = self.side(node.value)
        elif isinstance(node, ast.AugAssign):
            before = self.value(node.target)
            value = broadcast([before, self.value(node.value)])
            if value != before and not isinstance(before, Memory | Several):  # the name stands for a larger tile
                self.assign(node, node.target, value)
        elif isinstance(node, ast.Return) and node.value:
            value = self.value(node.value)
            self.returned = value if not self.returned else self.returned
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, ast.If | ast.For | ast.While):
            if isinstance(node, ast.For):
                self.names[ast.unparse(node.target)] = ()
            self.of(node.body + node.orelse)

    def assign(self, node: ast.stmt, target: ast.expr, value: object) -> None:
        if isinstance(target, ast.Tuple):
            values = value if isinstance(value, Several) else [()] * len(target.elts)
            for each, own in zip(target.elts, values, strict=True):
                self.assign(node, each, own)
        elif isinstance(target, ast.Name):
            if not ast.unparse(node.value).startswith("gl.allocate_shared_memory("):  # says its shape itself
                self.shapes.found[self.module.name, node.lineno][target.col_offset].add(
                    () if isinstance(value, Several) else value
                )
            self.names[target.id] = value or self.names.get(target.id, ())

    def side(self, node: ast.expr) -> str:
        """The name of a side of a tile: without its module, and as the caller names it."""
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            shape = self.value(node.value.value)
            if shape and isinstance(node.slice, ast.Constant):
                return shape[node.slice.value]
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATOR_NAMES:
            return f"{self.side(node.left)} {OPERATOR_NAMES[type(node.op)]} {self.side(node.right)}"
        if isinstance(node, ast.Call):
            if ast.unparse(node.func).endswith("rows_of"):  # of shared memory: all sides but stages and columns
                long = [side for side in self.sides(node.args[0])[1:-1] if side != "1"]
                return long[0] if len(long) == 1 else "GROUP_ROWS"  # a box has so many cells
            return self.side(node.func).upper()
        if isinstance(node, ast.Name):
            return self.known_sides.get(node.id, node.id)
        return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)

    def sides(self, node: ast.expr) -> tuple[str, ...]:
        if isinstance(node, ast.List | ast.Tuple):
            return tuple(map(self.side, node.elts))
        if isinstance(node, ast.Attribute) and node.attr in ("shape", "block_shape"):
            return tuple(self.value(node.value)) or ("?",)
        return ()

    def value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ())
        if isinstance(node, ast.Tuple | ast.List):
            return Several(map(self.value, node.elts))
        if isinstance(node, OPERATORS):
            return self.operator(node)
        if isinstance(node, ast.Subscript):
            return self.subscript(node)
        if isinstance(node, ast.Attribute):
            whole = self.value(node.value)
            if isinstance(whole, Several) and node.attr in whole.names:
                return whole[whole.names.index(node.attr)]
            return ()
        if isinstance(node, ast.Call):
            return self.call(node)
        return ()

    def operator(self, node: ast.expr) -> object:
        parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return broadcast([self.value(each) for each in parts])

    def subscript(self, node: ast.Subscript) -> object:
        whole = self.value(node.value)
        if isinstance(whole, Several):
            if isinstance(node.slice, ast.Constant):  # some kernels have a table more
                return whole[node.slice.value] if node.slice.value < len(whole) else ()
            return (whole or [()])[0]
        if isinstance(node.slice, ast.Tuple) and whole:
            sides = iter(whole)
            return tuple("1" if isinstance(each, ast.Constant) else next(sides) for each in node.slice.elts)
        return ()

    def call(self, node: ast.Call) -> object:
        given = [each for star in node.args for each in self.argument(star)]
        name = ast.unparse(node.func)
        called = self.kernel(name)
        if called:
            return self.shapes.run(*called, given, [self.side(each) for each in node.args])
        if fields := self.fields(name):
            made = Several(given)
            made.names = fields
            return made
        language, _, last = name.rpartition(".")
        if language in ("tl", "gl", ""):
            return self.built_in(last, node, given)
        if isinstance(node.func, ast.Attribute):
            return self.method(node, self.value(node.func.value))
        return ()

    def argument(self, node: ast.expr) -> Iterator[object]:
        if isinstance(node, ast.Starred):
            whole = self.value(node.value)
            yield from whole if isinstance(whole, Several) else ()
        else:
            yield self.value(node)

    def kernel(self, name: str) -> tuple[Module, ast.FunctionDef] | None:
        first, _, rest = name.partition(".")
        if name in self.module.kernels:
            return self.module, self.module.kernels[name]
        path, _, last = f"{self.module.imported.get(first, first)}.{rest}".rstrip(".").rpartition(".")
        module = self.shapes.modules.get(path)
        return (module, module.kernels[last]) if module and last in module.kernels else None

    def fields(self, name: str) -> tuple[str, ...]:
        first, _, rest = name.partition(".")
        if name in self.module.tuples:
            return self.module.tuples[name]
        path, _, last = f"{self.module.imported.get(first, first)}.{rest}".rstrip(".").rpartition(".")
        module = self.shapes.modules.get(path)
        return module.tuples.get(last, ()) if module else ()

    def built_in(self, name: str, node: ast.Call, given: list) -> object:
        named = {each.arg: self.value(each.value) for each in node.keywords}
        if name == "warp_specialize":
            for function, arguments in (pair.elts for pair in node.args[0].elts):
                given, sides = ([each(x) for x in arguments.elts] for each in (self.value, self.side))
                self.shapes.run(*self.kernel(ast.unparse(function)), given, sides)
        if name == "arange":
            return (self.side(node.args[1]),)
        if name in ("zeros", "full"):
            return self.sides(node.args[0])
        if name == "allocate_shared_memory":
            return Memory(self.sides(node.args[1]))
        if name == "dot":
            return (given[0] or ("?",))[0], (given[1] or ("?",))[-1]
        if name == "trans":
            return given[0][::-1]
        if name == "warpgroup_mma":
            return given[2]
        if name == "warpgroup_mma_wait":
            return named["deps"] if len(named["deps"]) > 1 else named["deps"][0]
        if name == "reinterpret":
            return Memory(self.sides(node.args[2]))
        if name in REDUCTIONS:
            if not given[0] or len(node.args) == 1:
                return ()
            axis = node.args[1].value
            return given[0][:axis] + given[0][axis + 1 :]
        if name == "philox":
            return Several([broadcast(given)] * 4)
        if name == "split":
            return Several([given[0][:-1]] * 2)
        if name == "join":
            return (*broadcast(given), "2")
        if name in SAME:
            return given[0]
        if name == "inline_asm_elementwise":
            return broadcast(self.value(node.args[2]))
        if name in BROADCASTS:
            return broadcast(given)
        if name not in SCALARS and not name.endswith("Layout") and ast.unparse(node.func) != name:
            raise NotImplementedError(f"the shape of {ast.unparse(node.func)} is not known")
        return ()

    def method(self, node: ast.Call, whole: object) -> object:
        name, first = node.func.attr, node.args[0] if node.args else None
        if name in ("reshape", "view"):
            return self.sides(first) if len(node.args) == 1 else tuple(map(self.side, node.args))
        if name == "reinterpret":
            return Memory(self.sides(node.args[2]))
        if not whole or isinstance(whole, Several):
            return ()
        if name == "permute":
            return type(whole)(whole[each.value] for each in first.elts)
        if name == "expand_dims":
            return (*whole[: first.value], "1", *whole[first.value :])
        if name == "index":
            return Memory(whole[1:])
        if name == "slice":
            axis = node.args[2].value
            return Memory((*whole[:axis], self.side(node.args[1]), *whole[axis + 1 :]))
        if name == "load":
            return tuple(whole)
        return whole if name == "to" else ()


def read(folder: Path, package: str) -> Iterator[tuple[str, Module]]:
    """The sources below a folder that hold kernels, each after its dotted name."""
    for path in sorted(folder.rglob("*.py")):
        name = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
        module = Module(name, path.read_text(encoding="utf-8"))
        if module.kernels or module.tuples:
            yield name, module


def comments(text: str) -> dict[int, str]:
    """The comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


GENERIC = ("rows", "columns", "cells", "cells")  # names of sides that differ from call to call


def wanted(names: dict[int, set]) -> list[tuple[str, ...]]:
    """The shape of each name that a statement assigns, () for a scalar; nothing where all are."""
    wanted = []
    for shapes in names.values():
        tiles = [shape for shape in shapes if len(shape) > isinstance(shape, Memory)]  # [1] in memory is a barrier
        sides = [set(each) for each in zip(*tiles, strict=True)]
        wanted.append(tuple(each.pop() if len(each) == 1 else word for each, word in zip(sides, GENERIC, strict=False)))
    return wanted if any(wanted) else []


def spelled(shapes: list[tuple[str, ...]]) -> str:
    """The comment that gives these shapes."""
    texts = [f"[{', '.join(shape)}]" if shape else "scalar" for shape in shapes]
    return f"{texts[0]} each" if len(texts) > 1 and len(set(texts)) == 1 else ", ".join(texts)


def unmarked(modules: dict[str, Module]) -> list[str]:
    """The statements that assign tiles without saying their shapes, and what they should say."""
    found = []
    shapes = Shapes(modules).found
    for name, module in modules.items():
        said = comments(module.text)
        for node in (each for kernel in module.kernels.values() for each in ast.walk(kernel)):
            assigned = shapes.get((name, node.lineno)) if isinstance(node, ast.Assign | ast.AugAssign) else None
            tiles = wanted(assigned or {})
            if tiles and not any(spelled(tiles) in said.get(n, "") for n in range(node.lineno, node.end_lineno + 1)):
                found.append(f"{name}:{node.lineno} needs # {spelled(tiles)}")
    return found
