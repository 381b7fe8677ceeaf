"""How many elements the eager engine works on at a time."""

# Elements in a piece. On a CPU the tensors of a piece and its temporaries should share the L2 cache; on
# GPT-2's embedding, 2^17 to 2^18 elements were fastest (docs/performance.md). On other devices a piece should
# be large enough to hide the launches.
PIECE_ELEMENTS_CPU = 256 * 1024
PIECE_ELEMENTS = 64 * 1024 * 1024
# On a CPU, weights share calls up to this many elements. With more, every call would refill the cache.
JOINED_ELEMENTS_CPU = 32 * 1024
# Weights of at most STACKED_ELEMENTS are copied into stacks of at most STACK_ELEMENTS.
STACKED_ELEMENTS, STACK_ELEMENTS = 16 * 1024, 128 * 1024
# u is kept for weights of at most this many pieces: 16 MiB in float32.
KEPT_PIECES = 16
