"""include/adze.h for Python: constants, and what it says of each op. `make docs` writes this file."""

ROUNDING = {
    "ROUND_NORM": 1,
    "ROUND_STEPS": 2,
    "ROUND_VALUE": 4,
    "FLOAT_SUM": 8,
}
FLAGS = {
    "CONST_WEIGHTS": 1,
    "BATCH_INVARIANT": 2,
    "CONST_CACHE": 4,
}
DTYPES = {
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "float8_e4m3fn": 4,
    "int8": 5,
    "int32": 7,
    "int64": 8,
    "bool": 9,
    "float64": 10,
    "uint8": 11,
}
OPS = {
    "rms_norm": """\
rms_norm:   n = h / sqrt(mean(h^2) + eps)
layer_norm: n = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps)        means over the last dimension
both:       h   = residual + (gate + gate_table) * x        (absent residual: h = x; absent gate: factor 1)
            sum = h
            out = (n * (weight + weight_offset) + bias) * (1 + scale + scale_table) + shift + shift_table
The sum is rounded to x's dtype before it is normalised, unless ADZE_FLOAT_SUM. With ADZE_ROUND_STEPS each
of gate + gate_table, its product with x, the affine norm, scale + scale_table, 1 + that, the product,
shift + shift_table and the sum is rounded to x's dtype.
With out_dtype i8 or f8e4m3, out is rounded to x's dtype as it would be stored, and its rows are then quantised:
out and out_scale are what quantize makes of them.""",
    "layer_norm": """\
rms_norm:   n = h / sqrt(mean(h^2) + eps)
layer_norm: n = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps)        means over the last dimension
both:       h   = residual + (gate + gate_table) * x        (absent residual: h = x; absent gate: factor 1)
            sum = h
            out = (n * (weight + weight_offset) + bias) * (1 + scale + scale_table) + shift + shift_table
The sum is rounded to x's dtype before it is normalised, unless ADZE_FLOAT_SUM. With ADZE_ROUND_STEPS each
of gate + gate_table, its product with x, the affine norm, scale + scale_table, 1 + that, the product,
shift + shift_table and the sum is rounded to x's dtype.
With out_dtype i8 or f8e4m3, out is rounded to x's dtype as it would be stored, and its rows are then quantised:
out and out_scale are what quantize makes of them.""",
    "group_norm": """\
group_norm: out = act((x - mean) / sqrt(variance + eps) * weight[c] + bias[c]), mean and variance over one
batch entry's group of channels / groups neighbouring channels and all its positions""",
    "gated_add": """\
gated_add: out = residual + (gate + gate_table) * x, the sum of a norm without the norm. ADZE_ROUND_STEPS rounds
gate + gate_table and the product to x's dtype.""",
    "activation": """\
activation: out = act(x)""",
    "glu": """\
glu: out = act(gate) * value. With a value tensor, x is the gate; without, x holds both halves of each row.
ADZE_ROUND_STEPS rounds act(gate) to x's dtype. With out_dtype i8 or f8e4m3, out is rounded to x's dtype and its
rows are then quantised, as those of a norm.""",
    "softmax": """\
softmax: out[i] = exp(y[i] - max(y)) / sum(exp(y - max(y))), y = x * scale + mask, over the last dimension""",
    "gemm": """\
gemm: y_i = p(x) . w_i^T + bias_i, out = residual + gate * f(y). p(x) is x, or its norm by `norm` as rms_norm and
layer_norm have it, rounded to x's dtype. f(y) is act(y); with glu it is act(y) * y2. w2 and w3 read the same x:
the columns of y2 and y3 follow those of y in out, or with `separate` they are out2 and out3. Sums are in float.
ADZE_ROUND_STEPS rounds y, act(y), the product of glu, and gate * f to x's dtype; ADZE_ROUND_NORM is that of norm.
Infinities and NaN in x and w come out as the formula has them. A batch of products has w [batch, n, k] of x's
dtype and x [batch, m, k], without w2 and norm.
x may be quantised, of i8 with w of i8 or f8e4m3 with w of f8e4m3, without norm, where w's scales are of whole
rows. Then y is the product of the stored numbers, times x_scale, times w_scale, plus bias. The product of i8 is
exact; as a float it is rounded, and so it is after each scale. On Hopper the tensor cores add f8e4m3 of more than
16 tokens with 14 bits, 128 products at a time, unless ADZE_BATCH_INVARIANT. "x's dtype" above and below is then
out's. Only norm needs scratch; products of many tokens, and of x off 16-byte borders, are faster with all that
adze_gemm_scratch() says.""",
    "quantize": """\
quantize: numbers of fewer bits, by groups as gemm reads them, rounded to nearest. With `most` the largest |x| of a
group, and Q 127 (i8), 448 (f8e4m3) or 7 (4 bits):
  scale = most / Q                      q = x / scale, at most Q, plus zero = 8 for 4 bits
and with zero_points, where low <= 0 <= high are the ends of the group's range:
  scale = (high - low) / 15             zero = -low / scale, q = x / scale + zero, both 0 to 15
Each quotient is rounded to float, then the scale to its dtype, before it divides, and q and zero to the nearest
number of their kind, halves to even. Where scale is 0, q is zero, or 0. x must be finite.""",
    "dequantize": """\
dequantize: out[i, j] = (q - zero) * scale, the numbers that a quantised weight of gemm stands for. The product is
rounded to float, and then to out's dtype: as torch multiplies. Infinities and NaN come out as the formula has
them. A packed weight has two numbers for each byte of a row, or one less: k says which.""",
    "attention": """\
attention: out[i] = sum of w[i,j] v[j] over the keys j that query i sees, w[i,j] = exp(s[i,j]) / sum of
exp(s[i,j]), s[i,j] = c(scale * q[i] . k[j]) + mask[i,j]. With softcap, c(s) = softcap * tanh(s / softcap). Query i
of m has position p = n - m + i, where n is the number of keys of its sequence: the last query is at the last key.
causal: it sees keys up to p. window: it sees only keys whose distance to p is less than window. sinks: exp(sink)
of the head is added to the denominator. Where a query sees no key, or all its s are -inf, out is 0. Head h reads
head h / (heads / kv_heads) of k and v. Keys beyond the length of a sequence are not read. v must be finite at keys
that the sequence has and a query does not see. On tensor cores exp(s - max) is rounded to q's dtype before it
multiplies v.

By default each batch entry is a sequence: q is [batch, heads, m, d], k [batch, kv_heads, n, d]. Three inputs
change that, alone or together; the number of sequences must be the same in all:

q_offsets     q is [1, heads, total, d]: sequence s has its rows q_offsets[s] to q_offsets[s + 1] - 1. Rows that
              no sequence has are 0 in out.
k_offsets     k is [1, kv_heads, total, d], in the same way; without lengths and block_table.
block_table   k is [pages, kv_heads, page, d]: key j of sequence s is row j % page of its page j / page, whose
              number block_table[s, j / page] is; n is max_pages * page.

They are read when the kernel runs. A length that is negative or more than n is taken as 0 or n, an offset beyond
the total as the total. The CPU refuses offsets that decrease and, among pages that are read, a number that is not
0 to pages - 1. On CUDA such a page has no keys to see, and a sequence whose offsets decrease is empty.""",
    "attention_merge": """\
attention_merge: two results of attention, of the same queries and different keys, as one. With w = exp(lse):
out = (w_x * x + w_y * y) / (w_x + w_y), lse = log(w_x + w_y). A result whose lse is -inf has no share; where both
are, out is 0. Sinks belong to one of the two.""",
    "rope": """\
rope: of each pair (a at i, b at j), out[i] = a * cos[i] - b * sin[i], out[j] = b * cos[j] + a * sin[j];
elements from rotary_dim on are copied. A table of rotary_dim / 2 columns has one angle per pair.
ADZE_ROUND_STEPS rounds each product and the sum to q's dtype.""",
    "qk_norm_rope": """\
qk_norm_rope: rope of rms_norm(q) * (q_weight + weight_offset), and the same of k""",
    "rope_table": """\
rope_table: cos[..., i] = cos(pos[..., axis[i]] * freq[i]) * scale, and sin; NaN for angles beyond 2^31. An axis[i]
that is not 0 to axes - 1 is refused on the CPU and gives columns of NaN on CUDA, whose memory is not read before
the kernel runs.""",
    "embed": """\
embed: out[..., :] = table[ids[...], :] * scale. scale is rounded to table's dtype before it multiplies, and the
product once, as Gemma's models do. An id that is no row of table is refused on the CPU and gives a row of NaN on
CUDA, whose memory is not read before the kernel runs.""",
    "kv_append": """\
kv_append: q_out = p(q), and p(k) and v are written into the caches, of which all other elements stay. p is rope,
of the norm of qk_norm_rope where `norm` asks for it, and rounds as these ops do; without cos and sin it is the
norm alone, or nothing. Token t of batch entry b goes to slot lengths[b] + t, or to positions[b, t]. Slot s of a
contiguous cache is k_cache[b, :, s]; with a block_table it is k_cache[block_table[b, s / page], :, s % page]. No
two tokens may have the same place. A slot that the cache, the block_table or tables by slot do not have, and a
page that the cache does not have, are refused on the CPU, before anything is written. On CUDA, whose memory is not
read before the kernel runs, such a token is dropped: nothing is written for it but q_out, which is NaN where its
row of the tables does not exist.
A cache of i8 or f8e4m3 has a scale for each token and head: most / Q and the stored numbers are those of quantize
for the row, after it was rounded to k's dtype.""",
    "sample": """\
sample: one token for each row of logits. With x the logits as floats, NaN as -infinity, in this order, each step
rounded to float:
  y = x, of the ids in `previous` x * penalty where x < 0 and x / penalty elsewhere
  temperature 0: out is the lowest index of the largest y; otherwise y = y / temperature
  top_k   keeps the k largest y, and all that equal the k-th
  top_p   keeps a token while the tokens with a larger y have less than top_p of the probability that is left
  min_p   keeps a token whose probability is at least min_p of the largest
w = exp(y - max(y)) of the tokens that are kept, 0 of the others, is a float; their sums C[i] = w[0] + ... + w[i]
are exact to 2^-40 of the whole, S. out is the first i with C[i] > u * S. Tokens with the same y are kept or
dropped together. u is the first word of Philox 4x32-10, its upper 24 bits over 2^24, with the key seed and the
counter (counter, row, 0): seed and counter have 64 bits, and row is 0 where each row has its own seed.
logprob is log(softmax(x)[out]), of the logits as they were given: from such sums in double, rounded once. Ids of
`previous` that no logit has are passed over. Counts outside 0 to n are refused on the CPU, and on CUDA are taken
as the nearer end.""",
}
