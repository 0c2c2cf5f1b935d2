"""Triton's interpreter, four times as fast.

Most of the interpreter's time goes into what is the same at every call: it replaces the functions of
``triton.language`` by its own at every call of a device function (and never undoes the replacement of a nested call),
reads the signature of a kernel twice at every launch, and makes shapes, types and their names anew for every tensor.
Here the language is patched once for each module, signatures are read once, and types of one kind share one shape, as
do their tensors. The interpreter also checks integers for overflow, which it reports in debug mode only; here it does
not. Operands of one type or of a wider and a narrower one, numbers of Python and what is added to addresses skip the
search for a common type, and conversions to wider types that for their rule; constants are made once, and arguments are
read and written where they lie.

In older Tritons it computes ``tl.fma`` with two roundings, where every compiler rounds once, lets NaN win in
``tl.minimum`` and ``tl.maximum``, knows no constant of bfloat16, and makes an index of a scalar in a way that NumPy 2.4
refuses; here it does as in newer ones.
"""

import dataclasses
import functools
import inspect
import math
from types import SimpleNamespace

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
import triton.runtime.jit as jit


def patch_interpreter() -> None:
    patch_language = interpreter._patch_lang
    patched = {}  # id of a module's globals -> these, so that the id stays theirs
    kept = SimpleNamespace(restore=lambda: None)

    def patch_language_once(function):
        if id(function.__globals__) not in patched:
            patched[id(function.__globals__)] = function.__globals__
            patch_language(function)
        return kept

    np.seterr(all="ignore")  # no GPU reports what overflows or has no value
    interpreter._patch_lang = patch_language_once
    interpreter.inspect = inspect_once()
    interpreter._patch_builtin = patch_remembered_builtins
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    interpreter.InterpretedFunction.__call__ = call_rewritten
    tl.str_to_ty = functools.cache(tl.str_to_ty)
    jit._normalize_ty = functools.cache(jit._normalize_ty)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    spare_checks_of_data()
    share_block_types()
    share_shapes_of_tensors()
    spare_conversions()
    spare_searches_for_constants()
    leave_arguments_where_they_are()
    hold_addresses_to_their_alignment()
    hold_numbers_to_64_bits()
    if not hasattr(getattr(interpreter, "_interpreter", None), "fma_fp32"):
        round_fma_once()
        let_numbers_win()
        know_constants_of_bfloat16()
        make_indices_of_scalars()


def inspect_once():
    """The module ``inspect``, whose functions of a signature remember it."""
    signature = functools.cache(inspect.signature)

    def getcallargs(function, *args, **kwargs):
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    getfullargspec = functools.cache(inspect.getfullargspec)
    return SimpleNamespace(**vars(inspect) | {"getcallargs": getcallargs, "getfullargspec": getfullargspec})


FLOATS = {"fp32", "fp64"}
LIMITS = {"int32": 2**31, "int64": 2**63}
COMMON = {*FLOATS, *LIMITS, "int1"}
COMPARISONS = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
OPERATORS = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__rmul__": np.multiply,
    "__and__": np.bitwise_and, "__or__": np.bitwise_or, **COMPARISONS,
}  # fmt: skip
WIDER = {("int32", "int64"), ("int32", "fp64"), ("int64", "fp64"), ("fp32", "fp64")}
blocks = {}  # name of an element type and id of a shape -> block type
builtins_of = {}  # id of a module or class of the language -> its builtin functions, by name


def patch_remembered_builtins(package, builder, scope) -> None:
    if id(package) not in builtins_of:
        members = inspect.getmembers(package, tl.core.is_builtin)
        found = builtins_of[id(package)] = {name: interpreted(member) for name, member in members}
        if package is tl.tensor:
            found.update({name: operator(name, found[name]) for name in OPERATORS})
    for name, function in builtins_of[id(package)].items():
        if getattr(package, name) is function:  # an enclosing launch has patched the package
            return
        scope.set_attr(package, name, function)


def interpreted(builtin):
    semantic = interpreter.interpreter_semantic
    function = getattr(builtin, "__wrapped__", builtin)  # around it Triton asks whether there is a semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def operator(name, search):
    """An operator of tensors, of a tensor and a number of its type, or of an address and integers. For others
    ``search`` finds a common type."""
    function, compares, adds = OPERATORS[name], name in COMPARISONS, name == "__add__"
    kinds = {*LIMITS, "int1"} if name in ("__and__", "__or__") else {*LIMITS, *FLOATS}

    def operate(self, other):
        if type(other) is tl.constexpr:
            other = other.value
        handle, kind = self.handle, self.type
        common = kind.scalar
        if adds and common.is_ptr() and takes("int64", other):
            other = interpreter.interpreter_semantic.to_tensor(other)
        if type(other) is tl.tensor:
            beside = other.type
            if beside.is_block():
                if not kind.is_block():
                    kind = block_of(kind, beside.shape)
                elif kind.shape is not beside.shape:
                    return search(self, other)
            one, two = common.name, beside.scalar.name
            if adds and common.is_ptr() and two in LIMITS:
                return tl.tensor(interpreter.interpreter_builder.create_addptr(handle, other.handle), kind)
            if one not in kinds or two not in kinds or (one != two and {(one, two), (two, one)}.isdisjoint(WIDER)):
                return search(self, other)
            if (one, two) in WIDER:
                common = beside.scalar
            data = function(handle.data, other.handle.data)
        elif common.name in kinds and takes(common.name, other):
            data = function(handle.data, handle.data.dtype.type(other))
        else:
            return search(self, other)
        if compares:
            common = tl.int1
        kind = block_of(common, kind.shape) if kind.is_block() else common
        return tl.tensor(interpreter.TensorHandle(data, common), kind)

    return operate


def block_of(scalar, shape):
    key = (scalar.name, id(shape))
    if key not in blocks:
        blocks[key] = tl.block_type(scalar, shape)
    return blocks[key]


def call_rewritten(self, *args, **kwargs):
    """Calls a device function, whose text is rewritten once."""
    if "rewritten" not in vars(self):
        interpreter._patch_lang(self.fn)
        self.rewritten = self.rewrite()
    try:
        return self.rewritten(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def remembered(np_dtype):
    """The function of a type with a cache per scalar."""
    known = {}

    def of(kind):
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):
            return np_dtype(scalar)
        if scalar.name not in known:
            known[scalar.name] = np_dtype(scalar)
        return known[scalar.name]

    return of


def spare_checks_of_data() -> None:
    """The interpreter compares the size of what it has computed with that of its type."""

    def __init__(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = __init__
    binary_op = interpreter.InterpreterBuilder.binary_op

    def binary_op_unchecked(self, lhs, rhs, op):
        one, other = lhs.data, rhs.data
        if one.dtype == np.bool_ and other.dtype == np.bool_:
            return binary_op(self, lhs, rhs, op)
        output = op(one, other)
        if output.itemsize > one.itemsize:
            return binary_op(self, lhs, rhs, op)
        return interpreter.TensorHandle(output, lhs.dtype.scalar)

    interpreter.InterpreterBuilder.binary_op = binary_op_unchecked


def share_block_types() -> None:
    """Block types of one element type and shape have the same attributes, and the same shape is one object."""
    make, equal = tl.block_type.__init__, tl.block_type.__eq__
    attributes, shapes, known = {}, {}, {}

    def __init__(self, element_ty, shape):
        key = (element_ty.name, id(shape))  # every launch has pointer types of its own
        if key not in known:  # only shapes that are kept have ids that stay theirs
            sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "values", shape))
            if (element_ty.name, sizes) not in attributes:
                make(self, element_ty, shape)
                self.shape = shapes.setdefault(sizes, self.shape)
                attributes[element_ty.name, sizes] = dict(vars(self))
            found = attributes[element_ty.name, sizes]
            known[element_ty.name, id(found["shape"])] = found
        else:
            found = known[key]
        vars(self).update(found)

    def __eq__(self, other):
        same = isinstance(other, tl.block_type) and self.shape is other.shape and self.element_ty is other.element_ty
        return same or equal(self, other)

    tl.block_type.__init__, tl.block_type.__eq__ = __init__, __eq__
    tl.block_type.with_element_ty = lambda self, scalar: block_of(scalar, self.shape)


def share_shapes_of_tensors() -> None:
    make = tl.tensor.__init__
    attributes = {}  # id of a shape, or None for scalars -> shape and size of a tensor

    def __init__(self, handle, type):
        shape = type.shape if type.is_block() else None
        if id(shape) not in attributes:
            make(self, handle, type)
            attributes[id(shape)] = (shape, self.shape, self.numel)  # keeps the shape alive, whose id is the key
        else:
            _, self.shape, self.numel = attributes[id(shape)]
            self.handle, self.type, self.dtype = handle, type, type.scalar

    tl.tensor.__init__ = __init__


def constants_of(scalar_constant):
    """The function that makes tensors of Python's numbers, with a cache. Nothing can write to what it gives."""
    known = {}

    def of(self, value, dtype):
        key = (value, type(value), dtype and dtype.name, math.copysign(1.0, value))  # 0.0 == -0.0
        if key not in known:
            tensor = scalar_constant(self, value, dtype)
            tensor.handle.data.flags.writeable = False
            if value != value:
                return tensor
            known[key] = tensor
        return known[key]

    return of


def takes(name, number):
    """Whether a tensor of this type keeps it beside a number of Python."""
    if name in LIMITS:
        return type(number) is int and -LIMITS[name] <= number < LIMITS[name]
    return name in FLOATS and type(number) in (int, float)


def spare_conversions() -> None:
    """Operands of one type and shape are what an operation needs; a scalar becomes a block in one step."""
    semantic = type(interpreter.interpreter_semantic)
    cast, broadcast, computation_type = semantic.cast, semantic.broadcast_impl_value, semantic.computation_type_impl
    checked, where = semantic.binary_op_type_checking_impl, semantic.where
    equal = tl.dtype.__eq__
    computation_types, splats, common_shapes = {}, {}, {}  # shapes of types are kept: an id stays that of its shape

    def cast_others(self, input, dst_ty, fp_downcast_rounding=None):
        kind, wanted = input.type, dst_ty.scalar
        if kind.scalar is wanted and (kind.is_block() or not dst_ty.is_block()):
            return input
        if (kind.scalar.name, wanted.name) in WIDER and fp_downcast_rounding is None:
            handle = interpreter.TensorHandle(input.handle.data.astype(interpreter._get_np_dtype(wanted)), wanted)
            return self.tensor(handle, block_of(wanted, kind.shape) if kind.is_block() else wanted)
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def as_block(self, scalar, shape):
        kind, data = block_of(scalar.type, shape), scalar.handle.data
        if data.flags.writeable:
            return self.tensor(interpreter.TensorHandle(np.full(shape, data, data.dtype), scalar.type), kind)
        constant = (id(data), scalar.type.name, id(shape))
        if constant not in splats:
            block = np.full(shape, data, data.dtype)
            block.flags.writeable = False
            handle = interpreter.TensorHandle(block, scalar.type)
            splats[constant] = data, self.tensor(handle, kind)  # keeps the data alive, whose id is the key
        return splats[constant][1]

    def broadcast_others(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (as_block(self, lhs, right.shape) if right.is_block() else lhs), rhs
        if not right.is_block():
            return lhs, as_block(self, rhs, left.shape)
        if left.shape is right.shape:
            return lhs, rhs
        if len(left.shape) != len(right.shape):
            return broadcast(self, lhs, rhs)
        pair = id(left.shape), id(right.shape)
        if pair not in common_shapes:
            common_shapes[pair] = tl.block_type(tl.int1, [*np.broadcast_shapes(left.shape, right.shape)]).shape
        shape = common_shapes[pair]
        return spread(self, lhs, shape), spread(self, rhs, shape)

    def spread(self, block, shape):
        kind, handle = block.type, block.handle
        if kind.shape is shape:
            return block
        data = np.broadcast_to(handle.data, shape)
        return self.tensor(interpreter.TensorHandle(data, kind.scalar), block_of(kind.scalar, shape))

    def remembered_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        if key not in computation_types:
            computation_types[key] = computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return computation_types[key]

    def check_others(self, lhs, rhs, *rules, **more):
        """Operands of one common type, or a tensor and a number of that type, are computed in it; integers are added to
        addresses as they are."""
        one, other = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if one and other:
            name = rhs.dtype.name
            to_address = name in LIMITS and rules[:1] == (True,) and lhs.dtype.is_ptr()
            if to_address or (name in COMMON and name == lhs.dtype.name):
                return broadcast_others(self, lhs, rhs)
        elif one:
            if takes(lhs.dtype.name, rhs):
                return broadcast_others(self, lhs, self.scalar_constant(rhs, lhs.dtype))
        elif other and takes(rhs.dtype.name, lhs):
            return broadcast_others(self, self.scalar_constant(lhs, rhs.dtype), rhs)
        return checked(self, lhs, rhs, *rules, **more)

    def choose(self, condition, x, y):
        x, y = self.binary_op_type_checking_impl(x, y, True, True)
        kind, of_condition = x.type, condition.type
        if of_condition.is_block() and not kind.is_block():
            kind = block_of(kind, of_condition.shape)
        if condition.dtype.name != "int1" or (of_condition.is_block() and kind.shape is not of_condition.shape):
            return where(self, condition, x, y)
        data = np.where(condition.handle.data, x.handle.data, y.handle.data)
        return self.tensor(interpreter.TensorHandle(data, kind.scalar), kind)

    semantic.binary_op_type_checking_impl, semantic.where = check_others, choose
    semantic.scalar_constant = constants_of(semantic.scalar_constant)
    semantic.cast, semantic.broadcast_impl_value, semantic.computation_type_impl = (
        cast_others,
        broadcast_others,
        remembered_type,
    )
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def spare_searches_for_constants() -> None:
    """Of a type that is neither a constant nor a list of some there is nothing to unwrap."""
    unwrap, may_hold = tl.core._unwrap_if_constexpr, {}

    def unwrap_others(value):
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        if kind not in may_hold:
            may_hold[kind] = issubclass(kind, (list, tuple, tl.tuple, tl.constexpr))
        return unwrap(value) if may_hold[kind] else value

    tl.core._unwrap_if_constexpr = unwrap_others


def leave_arguments_where_they_are() -> None:
    """The interpreter copies tensors to the CPU and back, which changes nothing where they lie there."""
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, named: (arguments, named)
    interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None


def hold_addresses_to_their_alignment() -> None:
    """Where a promised alignment does not hold, a GPU stops at the first vector that it loads."""

    def set_attr(self, key, value):
        if key == "tt.divisibility":
            assert not np.any(self.data[..., 0] % value[-1]), f"addresses are no multiples of {value[-1]} bytes"
        self.attr[key] = value

    interpreter.TensorHandle.set_attr = set_attr


def hold_numbers_to_64_bits() -> None:
    """A launch on a GPU raises an error for an integer beyond."""
    start = interpreter.GridExecutor.__call__

    def start_with_numbers(self, *arguments, **options):
        assert all(-(2**63) <= each < 2**63 for each in arguments if isinstance(each, int)), arguments
        return start(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = start_with_numbers


def round_fma_once() -> None:
    """Without it ``fma(x, scale, -k)``, what is left of ``x scale`` beyond the integer ``k``, loses its last bits."""

    def create_fma(self, x, y, z):
        if z.data.dtype != np.float32:
            raise NotImplementedError(f"tl.fma of {z.data.dtype} rounds twice in the interpreter of this Triton")
        return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)

    type(interpreter.interpreter_builder).create_fma = create_fma


def let_numbers_win() -> None:
    """Let numbers win beside NaN, as compiled kernels do without asking for it: else no test would miss it."""
    builder = type(interpreter.interpreter_builder)
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)


def fma(x, y, z):
    """``x y + z`` of float32, rounded once.

    float64 holds the product exactly. A sum that it does not hold is rounded to the neighbour whose last bit is 1, so
    that the rounding to float32 goes the way of the exact sum: in a float32 and in the middle of two this bit is 0.
    """
    product, z = np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)
    total = product + z
    of_z = total - product
    error = (product - (total - of_z)) + (z - of_z)  # total + error is the exact sum
    inexact = np.isfinite(error) & (error != 0)
    even = (np.asarray(total).view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact & even, np.nextafter(total, toward), total).astype(np.float32)


def know_constants_of_bfloat16() -> None:
    builder = type(interpreter.interpreter_builder)
    builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)


def make_indices_of_scalars() -> None:
    """A scalar is an array of one dimension there."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
