"""Random calls of every op, from a seed: with random shapes, strides, offsets and dtypes. Needs no torch."""

import dataclasses
import math
import random

SIZES = {"f32": 4, "f16": 2, "bf16": 2}
EPS = 1e-6
DIM = (32, 131072)
BYTES = (64 << 10, 600 << 20)
TINY_DIM, TINY_BYTES = (32, 2000), (4 << 10, 64 << 10)
GROUP_SHAPES = [  # channels and positions (height, width) of U-Nets and VAEs; a draw changes the size and the batch
    (128, 512, 512), (128, 256, 256), (256, 256, 256), (256, 128, 128), (320, 128, 128), (320, 64, 64),
    (512, 128, 128), (512, 64, 64), (640, 64, 64), (640, 32, 32), (960, 32, 32), (1280, 32, 32), (1280, 16, 16),
    (2560, 16, 16),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tensor. Strides and the offset count elements; the memory before the offset is aligned to 16 bytes."""

    dtype: str
    shape: tuple
    stride: tuple
    offset: int = 0

    @property
    def bytes(self):
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def aligned(self):
        """All rows are aligned to 16 bytes."""
        steps = [s for n, s in zip(self.shape[:-1], self.stride[:-1], strict=True) if n > 1]
        return all(step * SIZES[self.dtype] % 16 == 0 for step in [*steps, self.offset])

    def __str__(self):
        sizes = ",".join(f"{n}:{s}" for n, s in zip(self.shape, self.stride, strict=True))
        return f"{self.dtype}[{sizes}]" + (f"@+{self.offset}" if self.offset else "")


def dense(shape):
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= n
    return tuple(reversed(stride))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op: tensors and numbers, by the names of its fields."""

    op: str
    tensors: dict
    numbers: dict
    outputs: dict  # new and contiguous, as a call of torch gives them

    @property
    def line(self):
        """As `adze run` takes it."""
        words = [f"{name}={spec}" for name, spec in self.tensors.items()]
        return " ".join([self.op, *words, *(f"{name}={value:g}" for name, value in self.numbers.items())])

    @property
    def bytes(self):
        return sum(spec.bytes for spec in (*self.tensors.values(), *self.outputs.values()))

    @property
    def main(self):
        return self.tensors.get("x") or self.tensors["q"]

    @property
    def aligned(self):
        """All rows of all large tensors are aligned to 16 bytes."""
        large = [spec for spec in self.tensors.values() if spec.bytes * 4 >= self.main.bytes]
        return all(spec.aligned for spec in (*large, *self.outputs.values()))


class Draw:
    """One random call. A change in the order of its draws changes the calls of every seed."""

    def __init__(self, rng, tiny=False):
        self.rng = rng
        self.dims, self.total = (TINY_DIM, TINY_BYTES) if tiny else (DIM, BYTES)
        self.dtype = rng.choice(["bf16", "bf16", "f16", "f32"])

    def chance(self, share):
        return self.rng.random() < share

    def between(self, low, high):
        """Log-uniform."""
        return round(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def length(self):
        """The length of a row: half are multiples of 8, a quarter even, a quarter odd."""
        n, kind = self.between(*self.dims), self.rng.random()
        if kind < 0.5:
            return max(n // 8 * 8, self.dims[0])
        return n // 2 * 2 + (2 if n // 2 % 4 == 0 else 0) if kind < 0.75 else n | 1

    def count(self, bytes_each):
        """The number of rows of bytes_each that gives the call the drawn size."""
        return max(1, round(self.between(*self.total) / bytes_each))

    def offset(self, share):
        """A misalignment in elements, for a share of the draws; else 0."""
        per_vector = 16 // SIZES[self.dtype]
        return self.rng.randrange(1, per_vector) if self.chance(share) else 0

    def rows(self, *shape):
        """Contiguous rows, or rows of a wider tensor. The first element may be misaligned."""
        dim, lead = shape[-1], 1
        kind = self.rng.random()
        if kind > 0.6 and len(shape) > 1:
            pad = self.between(1, dim)
            lead = dim + (pad // 8 * 8 if kind < 0.8 else pad)
        stride = dense((*shape[:-1], lead)) if lead >= dim else dense(shape)
        return Spec(self.dtype, shape, stride, self.offset(0.25))

    def like(self, spec):
        """A second tensor of the same shape: half of the time laid out the same."""
        return spec if self.chance(0.5) else self.rows(*spec.shape)

    def vector(self, *shape):
        """A weight, a scale: of the call's dtype or f32."""
        dtype = "f32" if self.chance(0.2) else self.dtype
        return Spec(dtype, shape, dense(shape), self.offset(0.1) % (16 // SIZES[dtype]))

    def new(self, shape, dtype=None):
        return Spec(dtype or self.dtype, tuple(shape), dense(shape))

    def call(self, op, tensors, numbers, **outputs):
        given = {name: spec for name, spec in tensors.items() if spec is not None}
        return Call(op, given, numbers, {name: self.new(shape) for name, shape in outputs.items()})

    # ---- The ops ----

    def norm(self, op):
        dim, heads = self.length(), self.chance(0.15)
        residual, modulated = self.chance(0.35), self.chance(0.4) and not heads
        if heads:  # of an attention layer: a norm of each
            dim = 8 * self.rng.randrange(4, 33)
        count = self.count(dim * SIZES[self.dtype] * (4 if residual else 2))
        shape = (max(1, count // 32), 32, dim) if heads else (count, dim)
        if modulated:
            batch = self.rng.choice([1, 1, 2, 4])
            shape = (batch, max(1, count // batch), dim)
        x = self.rows(*shape)
        tensors = {"x": x, "residual": self.like(x) if residual else None}
        affine = not modulated or self.chance(0.2)
        tensors["weight"] = self.vector(dim) if affine and self.chance(0.9) else None
        tensors["bias"] = self.vector(dim) if affine and op == "layer_norm" and self.chance(0.7) else None
        if modulated:
            tensors |= {"scale": self.vector(shape[0], 1, dim), "shift": self.vector(shape[0], 1, dim)}
        outputs = {"out": shape} | ({"sum": shape} if residual else {})
        return self.call(op, tensors, {"eps": EPS}, **outputs)

    def rms_norm(self):
        return self.norm("rms_norm")

    def layer_norm(self):
        return self.norm("layer_norm")

    def group_norm(self):
        channels, height, width = self.rng.choice(GROUP_SHAPES)
        groups = self.rng.choice([32, 32, 32, 16])
        most = self.total[1] // (2 * channels * SIZES[self.dtype])
        height, width = (max(4, round(n * self.rng.choice([0.5, 0.75, 1, 1, 1.03, 1.25]))) for n in (height, width))
        while height * width > most:
            height, width = max(1, height // 2), max(1, width // 2)
        batch = min(self.rng.choice([1, 1, 2, 4, 8]), max(1, most // (height * width)))
        last = self.chance(0.5)
        shape = (batch, height, width, channels) if last else (batch, channels, height, width)
        x = Spec(self.dtype, shape, dense(shape), self.offset(0.25))
        tensors = {"x": x, "weight": self.vector(channels), "bias": self.vector(channels)}
        numbers = {"eps": EPS, "groups": groups, "channels_last": int(last), "act": 1 if self.chance(0.5) else 0}
        return self.call("group_norm", tensors, numbers, out=shape)

    def gated_add(self):
        dim, batch = self.length(), self.rng.choice([1, 1, 2, 4])
        shape = (batch, max(1, self.count(3 * dim * SIZES[self.dtype]) // batch), dim)
        x = self.rows(*shape)
        tensors = {"x": x, "residual": self.like(x), "gate": self.vector(batch, 1, dim)}
        return self.call("gated_add", tensors, {}, out=shape)

    def activation(self):
        dim = self.length()
        x = self.rows(self.count(2 * dim * SIZES[self.dtype]), dim)
        return self.call("activation", {"x": x}, {"act": self.rng.choice([1, 2, 3])}, out=x.shape)

    def glu(self):
        dim = self.length()
        shape = (self.count(3 * dim * SIZES[self.dtype]), dim)
        numbers = {"act": self.rng.choice([1, 1, 2, 3])}
        if self.chance(0.5):
            x = self.rows(*shape)
            return self.call("glu", {"x": x, "value": self.like(x)}, numbers, out=shape)
        numbers["value_first"] = int(self.chance(0.3))
        return self.call("glu", {"x": self.rows(shape[0], 2 * dim)}, numbers, out=shape)

    def softmax(self):
        dim = self.length()
        count = self.count(2 * dim * SIZES[self.dtype])
        masked = self.chance(0.3)
        numbers = {"scale": 0.125} if self.chance(0.5) else {}
        x = self.rows(*((1, count, dim) if masked else (count, dim)))
        return self.call(
            "softmax", {"x": x, "mask": self.vector(1, 1, dim) if masked else None}, numbers, out=x.shape
        )

    def heads(self):
        """q and k of an attention layer and their tables: [batch, seq, heads, dim] or [batch, heads, seq, dim], of
        their own memory or views of a fused QKV projection. Returns tensors, numbers and shapes of the outputs."""
        dim = 8 * self.rng.randrange(4, 33)
        q_heads = self.rng.choice([4, 8, 12, 16, 24, 28, 32, 40, 64])
        k_heads = self.rng.choice([n for n in (q_heads, q_heads // 2, q_heads // 4) if n])
        has_k, fused = self.chance(0.85), self.chance(0.4)
        rotary = dim if self.chance(0.6) else 2 * self.rng.randrange(8, dim // 2)
        if rotary < dim and self.chance(0.75):
            rotary = max(16, rotary // 16 * 16)
        batch = self.rng.choice([1, 1, 2, 4])
        each = 2 * dim * (q_heads + (k_heads if has_k else 0)) * SIZES[self.dtype]
        seq = max(1, self.count(each) // batch)
        first = self.chance(0.3)
        token = (q_heads + 2 * k_heads) * dim if fused else 0
        offset = self.offset(0.2)

        def part(heads, at):
            shape = (batch, heads, seq, dim) if first else (batch, seq, heads, dim)
            if not fused:
                return Spec(self.dtype, shape, dense(shape), offset)
            stride = (seq * token, dim, token, 1) if first else (seq * token, token, dim, 1)
            return Spec(self.dtype, shape, stride, (at + offset) % (16 // SIZES[self.dtype]))

        tensors = {"q": part(q_heads, 0), "k": part(k_heads, q_heads * dim) if has_k else None}
        columns = rotary if self.chance(0.5) else rotary // 2
        table = self.new((seq, columns), "f32" if self.chance(0.5) else self.dtype)
        numbers = {"pairs": int(self.chance(0.4)), "rotary_dim": rotary, "heads_first": int(first)}
        outputs = {name + "_out": spec.shape for name, spec in tensors.items() if spec}
        return tensors, {"cos": table, "sin": table}, numbers, outputs

    def rope(self):
        tensors, tables, numbers, outputs = self.heads()
        return self.call("rope", tensors | tables, numbers, **outputs)

    def qk_norm_rope(self):
        tensors, tables, numbers, outputs = self.heads()
        across = self.chance(0.25)
        weights = {}
        for name, spec in tensors.items():
            if spec:
                heads, dim = spec.shape[1 if numbers["heads_first"] else 2], spec.shape[3]
                weights[name + "_weight"] = self.vector(heads * dim if across else dim)
        numbers = {"eps": EPS, "across_heads": int(across)} | numbers
        return self.call("qk_norm_rope", tensors | weights | tables, numbers, **outputs)


OPS = ("rms_norm", "layer_norm", "group_norm", "softmax", "activation", "glu", "rope", "qk_norm_rope", "gated_add")


def draws(seed, count, ops=OPS, tiny=False):
    """Calls of all ops in turn. A call depends on the seed and its number, not on the count."""
    made = []
    for number in range(count):
        op = ops[number % len(ops)]
        made.append(getattr(Draw(random.Random(f"{seed} {number} {op}"), tiny), op)())
    return made
