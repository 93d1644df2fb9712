"""Weights of other formats as adze's: the same numbers, bit for bit, in the layout that adze.h documents.

Each function takes the tensors of one layer by their names in a checkpoint, and the part of its config that says how
they are stored. It returns a Weight, or raises ValueError with what cannot be expressed. Scales keep their dtype: f16
scales serve bf16 activations as they are."""

import torch

from .weight import GROUPS, Weight, pack

# AWQ has column AWQ_ORDER[i] of eight in bits 4 i to 4 i + 3.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _taken(format, tensors, *names):
    """The tensors of these names."""
    for name in names:
        if name not in tensors:
            raise ValueError(f"{format}: the checkpoint has no {name} for this layer")
    return [tensors[name] for name in names]


def _check_matrix(format, dtype, **tensors):
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.dim() != 2:
            raise ValueError(
                f"{format}: {name} is {tensor.dtype} with {tensor.dim()} dimensions, it must be {dtype} with 2"
            )


def _group_of(format, group):
    """The columns of a group, or -1 for all."""
    group = -1 if group is None else group
    if type(group) is not int or group == 0 or group < -1:
        raise ValueError(f"{format}: group_size is {group!r}, it must be -1, 32, 64 or a multiple of 128")
    return group


SCALES = (torch.float32, torch.float16, torch.bfloat16)


def _check_scale(format, scale):
    if scale.dtype not in SCALES:
        raise ValueError(f"{format}: scales are {scale.dtype}, they must be float32, float16 or bfloat16")


def _check_groups(format, shape, group, scale, zero=None):
    """Scales and zeros are [n, k / group]: another shape would be read as that of other groups."""
    n, k = shape
    size = k if group == -1 else group
    want = [n, -(-k // size) if size else 0]
    for name, part in (("scales", scale), ("zeros", zero)):
        if part is not None and list(part.shape) != want:
            raise ValueError(
                f"{format}: a weight {[n, k]} in groups of {size} columns has {name} {want}, in the checkpoint they"
                f" are {list(part.shape)}"
            )
    _check_scale(format, scale)


def _fields(words, bits, dim):
    """The unsigned numbers of `bits` bits in int32 words, the lowest bits first, along a dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)
    if dim == 0:
        return numbers.transpose(1, 2).flatten(0, 1)
    return numbers.flatten(1)


def _grouped(format, parts, group, k):
    """Scales and zeros [n, k / group], for groups that gemm has: one of a multiple of 128 columns is several."""
    if group == -1 or group >= k:
        return parts
    if group in GROUPS:
        return parts
    if group % 128:
        raise ValueError(f"{format}: group_size is {group}, it must be -1, 32, 64 or a multiple of 128")
    columns = -(-k // 128)
    return [None if part is None else part.repeat_interleave(group // 128, 1)[:, :columns] for part in parts]


def _made(format, numbers, scale, zero, bits, group, order=None):
    """The Weight of unsigned numbers [n, k] with a scale and a zero [n, groups]."""
    k = numbers.shape[1]
    middle = 1 << (bits - 1)
    if bits == 4:
        scale, zero = _grouped(format, [scale, zero], group, k)
        if zero is not None and bool((zero == middle).all()):
            zero = None
        zero = None if zero is None else zero.to(torch.uint8).contiguous()
        return Weight(pack(numbers), scale.contiguous(), zero, order)
    signed = numbers.to(torch.int16) - middle
    if zero is not None:
        columns = torch.arange(k, device=numbers.device) // (k if group == -1 else group)
        signed = numbers.to(torch.int16) - zero.to(torch.int16)[:, columns]
    if bool((signed < -128).any()) or bool((signed > 127).any()):
        raise ValueError(
            f"{format}: numbers of 8 bits less their zeros do not fit into int8, which has no zeros in adze"
        )
    (scale,) = _grouped(format, [scale], group, k)
    return Weight(signed.to(torch.int8).contiguous(), scale.contiguous(), None, order)


def _check_bits(format, bits):
    if type(bits) is not int or bits not in (4, 8):
        raise ValueError(f"{format}: bits is {bits!r}, it must be 4 or 8")


def _by_groups(format, numbers, g_idx, group, groups):
    """The numbers with columns sorted by group, and the order of the columns; None where they are sorted already.

    gemm has groups of neighbouring columns. Where the checkpoint was quantised in the order of activations
    (desc_act), neighbours in a group are apart: the columns of the weight are sorted once, here, and the input of the
    layer is gathered in that order in each call."""
    k = numbers.shape[1]
    if g_idx is None:
        return numbers, None
    if g_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{format}: g_idx is {g_idx.dtype}, it must be int32 or int64")
    g_idx = g_idx.to(numbers.device, torch.int64)
    if g_idx.shape != (k,) or (k and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups):
        raise ValueError(f"{format}: g_idx must have {k} elements of 0 to {groups - 1}, one for each column")
    size = k if group == -1 else group
    due = torch.arange(k, device=numbers.device) // size
    if torch.equal(g_idx, due):
        return numbers, None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order], due):
        counts = torch.bincount(g_idx, minlength=groups).tolist()
        wrong = next(i for i, n in enumerate(counts) if n != min(size, max(k - i * size, 0)))
        raise ValueError(
            f"{format}: g_idx gives group {wrong} {counts[wrong]} columns, and {size} are in a group: this order"
            " cannot be expressed"
        )
    return numbers[:, order], order


def _layout(config, default, *names):
    """(the name under which a config has its layout, the layout): programs have written it under several names."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    found = config.get(name)
    return name, default if found is None else str(found).lower()


def awq(tensors, config):
    """AWQ, version "gemm": qweight [k, n / 8] and qzeros [k / group, n / 8] of int32, scales [k / group, n]."""
    bits = config.get("bits", config.get("w_bit", 4))
    group = _group_of("awq", config.get("group_size", config.get("q_group_size", 128)))
    name, layout = _layout(config, "gemm", "version", "format", "checkpoint_format")
    if layout != "gemm":
        raise ValueError(f'awq: {name} is {layout!r}, it must be "gemm"')
    if bits != 4:
        raise ValueError(f"awq: bits is {bits!r}, it must be 4")
    words, scale = _taken("awq", tensors, "qweight", "scales")
    _check_matrix("awq", torch.int32, qweight=words)
    _check_matrix("awq", scale.dtype, scales=scale)
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()

    def columns(words):  # [rows, n] of [rows, n / 8], in the order of the columns
        return _fields(words, 4, 1).unflatten(1, (-1, 8))[:, :, place].flatten(1)

    numbers, zero = columns(words).t(), None
    if config.get("zero_point", True) or "qzeros" in tensors:
        (zero,) = _taken("awq", tensors, "qzeros")
        _check_matrix("awq", torch.int32, qzeros=zero)
        zero = columns(zero).t()
    _check_groups("awq", numbers.shape, group, scale.t(), zero)
    return _made("awq", numbers, scale.t(), zero, 4, group)


def gptq(tensors, config):
    """GPTQ: qweight [k / 8, n] and qzeros [k / group, n / 8] of int32, scales [k / group, n], g_idx [k].

    In the first version of the format a zero is stored less one, in "gptq_v2" as it is."""
    bits, group = config.get("bits", 4), _group_of("gptq", config.get("group_size", 128))
    _check_bits("gptq", bits)
    name, layout = _layout(config, "gptq", "checkpoint_format", "format")
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f'gptq: {name} is {layout!r}, it must be "gptq" or "gptq_v2"')
    words, scale, zero = _taken("gptq", tensors, "qweight", "scales", "qzeros")
    _check_matrix("gptq", torch.int32, qweight=words, qzeros=zero)
    _check_matrix("gptq", scale.dtype, scales=scale)
    if config.get("desc_act"):
        _taken("gptq", tensors, "g_idx")
    numbers, scale = _fields(words, bits, 0).t(), scale.t()
    zero = _fields(zero, bits, 1).t()[: numbers.shape[0]] + (layout == "gptq")
    _check_groups("gptq", numbers.shape, group, scale, zero)
    numbers, order = _by_groups("gptq", numbers, tensors.get("g_idx"), group, scale.shape[1])
    return _made("gptq", numbers, scale, zero, bits, group, order)


def _block(format, q, scale, size):
    n, k = q.shape
    _check_scale(format, scale)
    if size not in ([128, 128], (128, 128)):
        raise ValueError(f"{format}: blocks are {size}, they must be [128, 128]")
    if list(scale.shape) != [-(-n // 128), -(-k // 128)]:
        raise ValueError(f"{format}: the scale of a weight {[n, k]} is {list(scale.shape)}")
    return Weight(q, scale)


def _floats(scale):
    """A scale in a dtype that gemm has: a power of two of 8 bits is a float32."""
    return scale.to(torch.float32) if scale.dtype == torch.float8_e8m0fnu else scale


def _of_all(format, q, scale):
    _check_scale(format, scale)
    if scale.numel() != 1:
        raise ValueError(f"{format}: the scale of a weight {list(q.shape)} is {list(scale.shape)}, it must be [1]")
    return Weight(q, scale.reshape(1))


def fp8(tensors, config):
    """fp8 with blocks of 128 x 128, as DeepSeek-V3 and Qwen3-FP8 have it: weight [n, k], weight_scale_inv [n / 128,
    k / 128], which multiplies in spite of its name; or one scale for the whole weight."""
    q, scale = _taken("fp8", tensors, "weight", "weight_scale_inv")
    _check_matrix("fp8", torch.float8_e4m3fn, weight=q)
    size = config.get("weight_block_size", [128, 128])
    if size is None:
        return _of_all("fp8", q, _floats(scale))
    return _block("fp8", q, _floats(scale), size)


def compressed_tensors(tensors, config):
    """compressed-tensors: "pack-quantized" (4 or 8 bits in int32, weight_packed), "int-quantized", "float-quantized"
    and "naive-quantized" (a byte for each number, weight). config is the scheme of the layer's group, with `weights`
    and `format`. What it says of activations is not applied: gemm takes them as they are."""
    name, scheme = f"compressed-tensors, {config.get('format')}", config.get("weights")
    if not isinstance(scheme, dict):
        raise ValueError(f"{name}: the config of the layer's group has no weights")
    bits, kind = scheme.get("num_bits", 8), scheme.get("type", "int")
    (scale,) = _taken(name, tensors, "weight_scale")
    if "weight_packed" not in tensors:
        (q,) = _taken(name, tensors, "weight")
        return _bytes(name, q, _floats(scale), tensors.get("weight_zero_point"), scheme)
    _check_bits(name, bits)
    if kind != "int":
        raise ValueError(f'{name}: type is {kind!r}, it must be "int"')
    words, shape = _taken(name, tensors, "weight_packed", "weight_shape")
    _check_matrix(name, torch.int32, weight_packed=words)
    if shape.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: weight_shape is {shape.dtype}, it must be int32 or int64")
    shape = shape.flatten()
    if shape.numel() != 2 or shape[0] != words.shape[0] or -(-int(shape[1]) * bits // 32) != words.shape[1]:
        raise ValueError(f"{name}: weight_shape is {shape.tolist()}, weight_packed {list(words.shape)}")
    n, k = shape.tolist()
    group, scale = _strategy(name, scheme), _floats(scale)
    numbers = _fields(words, bits, 1)[:, :k]
    if scale.numel() == 1 and scheme.get("strategy") in (None, "tensor"):
        scale = scale.reshape(1, 1).expand(n, 1)
    zero = None
    if not scheme.get("symmetric", True):  # packed along n; numbers and zeros have the same offset
        (zero,) = _taken(name, tensors, "weight_zero_point")
        _check_matrix(name, torch.int32, weight_zero_point=zero)
        zero = _fields(zero, bits, 0)[:n]
    elif "weight_zero_point" in tensors and bool((tensors["weight_zero_point"] != 0).any()):
        raise ValueError(f"{name}: weight_zero_point is not 0, and the config says that the weights are symmetric")
    if scheme.get("actorder") in (True, "group", "dynamic"):
        _taken(name, tensors, "weight_g_idx")
    _check_groups(name, (n, k), group, scale, zero)
    numbers, order = _by_groups(name, numbers, tensors.get("weight_g_idx"), group, scale.shape[1])
    return _made(name, numbers, scale, zero, bits, group, order)


def _strategy(name, scheme):
    """The columns of a group. Without a strategy the size of a group says which it is."""
    group = _group_of(name, scheme.get("group_size") or None)
    strategy = scheme.get("strategy") or ("channel" if group == -1 else "group")
    if strategy not in ("tensor", "channel", "group"):
        raise ValueError(f'{name}: strategy is {strategy!r}, it must be "tensor", "channel", "group" or "block"')
    return group if strategy == "group" else -1


def _bytes(name, q, scale, zero, scheme):
    _check_matrix(name, torch.float8_e4m3fn if scheme.get("type", "int") == "float" else torch.int8, weight=q)
    if zero is not None and bool((zero != 0).any()):
        raise ValueError(f"{name}: weights of 8 bits have zero points, which adze does not have for them")
    if scheme.get("strategy") == "block":
        return _block(name, q, scale, scheme.get("block_structure"))
    group = _strategy(name, scheme)
    if scale.numel() == 1 and scheme.get("strategy") in (None, "tensor"):
        return _of_all(name, q, scale)
    scale = scale[:, None] if scale.dim() == 1 else scale
    _check_groups(name, q.shape, group, scale)
    (scale,) = _grouped(name, [scale], group, q.shape[1])
    return Weight(q, scale.contiguous())
