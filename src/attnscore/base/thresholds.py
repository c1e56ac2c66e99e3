"""All sizes at which one way to compute takes less time or memory than another, each with its trade-off.

A figure names its machine and date. Times are of one thread unless they say otherwise. The C++ kernels' constants are
explained where they are defined and in ``csrc/TUNING.md``; tiles of the GPU kernels are in ``kernels/triton``.
"""

from __future__ import annotations

# Tiles of the framework's operations. 2^18 scores in float32 are 1 MB: the few arrays of a tile then stay in the
# last-level cache, and a tile is still long against the cost of a call from Python (about 50 us a tile).
TILE_SCORES = 2**18
# On an accelerator, where each operation costs about 10 us to start whatever its size: 32 MB, which takes about as long
# to read and write (computed from 3 TB/s, not measured).
ACCELERATOR_TILE_SCORES = 2**23
SMALLEST_TILE = 16
# Keys of a skipped or full segment between two others: shorter ones are merged with their neighbours.
SHORTEST_GAP = 64
# Keys of a tile with all queries, where their number is unknown.
LONGEST_KEY_TILE = 128

# Up to these sizes TensorFlow's own operations take less time in a graph than a callback to the native kernel
# (csrc/TUNING.md), of which the smallest call takes 150 us (Zen 5, 2026-11-28): elements of query, key and value
# together; pairs times dimension of a score that is a matrix product; values of a score that holds several a pair.
ONE_TILE_ELEMENTS = 5 * 2**17
ONE_TILE_PRODUCTS = 2**21
ONE_TILE_VALUES = 2**18
# Bounds of pairs times dimension between which a distance is computed there as a product. Fewer are not worth a branch
# in the program: where queries or keys are so large that the product is not accurate, it sums all terms one by one,
# which above the upper bound takes longer than a callback. Of 40 textbook shapes with gradients, distances about 1, the
# five between the bounds take 1.5 to 2.4 times as long without the product (Zen 5, 2026-11-28).
ONE_TILE_DISTANCE = 2**16, 2**20

# Time by a term for each key over the native kernel's in JAX's programs, forward, with gradients, on one thread |
# two of a Zen 4 with AVX-512 beside other work, 2026-11-27. With fewer queries the native kernel is faster, which XLA
# counts as no work to share: dot (64, 1, 10), d 64: 1.08, 0.84 | 1.40, 1.35; Gaussian (64, 1, 10), d 256: 1.61, 0.80
# | 4.1, 1.7; additive (32, 1, 4), h 32: 1.22, 0.90 | 1.72, 1.31. From here on: dot (128, 1, 12), d 32: 0.60, 0.69 |
# 0.54, 0.81; (256, 1, 8), d 64: 0.49, 0.64 | 1.10, 1.02; additive (256, 1, 10), h 64: 0.57, 0.49 | 1.15, 0.70.
# Memory limits both from FEW_KEYS_ELEMENTS in all keys on: dot (256, 1, 16), d 512: 1.8, 0.85 | 2.1, 1.0.
# Zen 5, 2026-11-28: dot (128, 1, 12), d 32: 0.59, 0.70 | 0.72, 0.75; additive (256, 1, 16), h 64: 0.69, 0.47 | 1.34,
# 0.75; (64, 1, 10), h 256: 1.14, 0.68 | 2.8, 1.11.
FEW_KEYS = 16
FEW_KEYS_ROWS = 128
FEW_KEYS_ELEMENTS = 2**19
# Pairs times dimension of a call that stays on its thread, by the number of queries. Below: dot (1, 1, 1), d 16: 0.81,
# 0.98 | 0.78, 1.00; additive (1, 2, 1), h 16: 0.80, 0.99 | 0.79, 0.95; but dot (2, 1, 10), d 8: 0.85, 0.40 | 1.5, 0.98;
# (1, 2, 2), d 16: 1.08, 1.25 | 1.06, 0.57.
FEW_KEYS_TINY = {1: 128, 2: 32}

# Pairs of query and key, over all heads, up to which additive scores are saved for the backward, whose most expensive
# part they are: 4 MB in float32, 8 in float64. 40 textbook shapes 1.01 times as fast, most 1.22 (Zen 5, 2026-11-28).
SAVED_SCORES = 2**20
# Rows of a gradient up to which they are summed in their own dtype. NumPy adds rows one by one: more lose digits.
ROWS_SUMMED_AS_THEY_ARE = 128
# Bytes from which arrays are aligned for frameworks that share no others: a smaller copy costs less than slicing.
ALIGNED_BYTES = 2**14

# Numbers of keys and values gathered at a time for a graph: 16 MB in float32.
GATHERED_NUMBERS = 2**22
# Padding of a block of gathered neighbours: a share of its edges, and as many entries as take the time of calling a
# kernel once more.
PADDED_SHARE = 1 / 8
PADDED_ENTRIES = 1024

# Projecting the keys alone that padding leaves, in multiply-adds, of which Zen with AVX-512 does 50 in a nanosecond:
# the cost of finding the rows and starting the operations inside a call (80 us, where a loop of them alone takes 30),
# and of moving one number of a row, such that two threads gain too: 1.1 to 1.35 times the speed with 128 features or
# more and half the keys, nothing with 64.
UNPADDING = 2**22
UNPADDING_A_NUMBER = 40

# Heads of all plans of a cache, over all elements of the batch: 2 KB each a direction, 75 MB. A call of more heads is
# planned each time.
PLANNED_HEADS = 2**15

# Terms, (query, key, channel), for each element of query and key above which a Gaussian is faster as an inner product
# in the native kernels. A term of the direct sum takes one more vector operation, a subtraction: 1/32 cycle in float32
# with two 512-bit units, 1/16 with AVX2. The norms take three passes over the elements (x * x is written, and read by
# the sum), 12 bytes each: 0.8 cycles from the second-level cache (16 bytes a cycle), 3 from memory (4 bytes a cycle).
# So both cost the same at 25 to 100 terms, with AVX2 at 12 to 50. A gradient raises both costs alike: three more
# subtractions in the native backward, about eight more passes in the framework's.
INNER_TERMS = 64
# Cost of checking whether it is accurate, in elements: about 50 us, or 2 cycles for each of these.
INNER_OVERHEAD = 2**16
# Terms from which an accelerator takes the inner product: 16 us at an H200's limit (computed).
ACCELERATOR_INNER_TERMS = 2**28

# Pairs of query and key, over all heads, up to which a layer's call computes the weights that it keeps in its own pass:
# 10 to 50 us, where reading them from kept inputs takes 500 to 700 us in Keras and Flax (Xeon with AVX-512,
# 2026-11-25). In PyTorch a forward takes 4 to 17% longer with them, and reading them later 80 to 100% (Zen 5,
# 2026-11-28): book-sized calls have up to so many, whose weights a notebook draws.
KEPT_WEIGHTS = 2**13

# Limits of a cached mask: queries (times batch rows), intervals (with more queries than this, the limit of queries) and
# index values; then the intervals of all cached masks, 32 MB.
CACHED_MASK_ROWS = 2**16
CACHED_MASK_INTERVALS = 4096
CACHED_MASK_NUMBERS = 1024
ALL_CACHED_INTERVALS = 2**21
# Queries (times batch rows) of all cached intervals of functions: 64 MB with one interval each.
ALL_FUNCTION_ROWS = 2**22
# Edges of all cached graphs, of 32 bytes each, and plans of each, of a few numbers for each edge.
ALL_CACHED_EDGES = 2**26
NEIGHBOUR_PLANS = 24
# Pairs of a function evaluated together: 1 MB of booleans, and 8 MB for each temporary of 64-bit numbers.
MASK_PAIRS = 2**20
# A mask that the native kernel cannot read is evaluated for a chunk of queries at a time: bytes of a chunk, but at
# least so many rows, as the module reads all keys for each query tile of 48 to 192 rows.
CHUNK_BYTES = 2**23
CHUNK_ROWS = 96
# Pairs of a chunk evaluated together, whose intermediate values may take 8 bytes a pair, and rows of a chunk: under a
# sliding window, all keys between the first and last window are evaluated.
EVALUATED_PAIRS = 2**20
EVALUATED_ROWS = 256
# Pairs of query and slot up to which the mask of a window of a cache becomes a boolean array: a plan reads that at each
# call, while intervals, being part of the plan, are planned anew at each step (0.5 ms).
WINDOW_PAIRS = 2**18

# Largest weights and pooled maps: weights computed at a time, 4 MB in float32, and queries of a map in a call of a
# kernel, as with fewer reading the keys would be most of its time.
POOLED_WEIGHTS = 2**20
POOLED_QUERIES = 1024
# Queries whose largest weights are searched at a time, at the least: a call of a kernel for fewer takes longer to plan.
TOP_QUERIES = 32

# Entries that one thread reads in less time than PyTorch takes to start an operation.
READ_ON_ONE_THREAD = 2**16
# Bytes from which JAX shares the memory of an array of NumPy: a smaller one is copied, 17 us in place of 45 (JAX 0.10).
SHARED_BYTES = 2**19

# Pairs of a chunk of additive gradients on a GPU: their gradients and weights take 64 MB.
GRADIENT_PAIRS = 2**23

# Rows of so many ranges are taken by their positions: one copy in place of many slices.
MANY_RANGES = 32
# Bytes of keys and values in a chunk of a file; two of them are in memory at a time.
FILE_CHUNK_BYTES = 2**25
# Queries, and pairs of a mask, counted together for the cost of a way to exchange.
COUNTED_QUERIES = 2**16
COUNTED_PAIRS = 2**22
# Neighbours of a graph that are closer than this are fetched as one range, with the keys between them.
FETCHED_GAP = 64
