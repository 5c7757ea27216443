"""Find the best token of each document for each query token, and return gradients to both: the kernels of late interaction.

Tokens are packed, one set after the other. Query tokens are cut into tiles anywhere, each document into tiles of its own.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def best_tokens(
    queries,  # [t, d]
    tokens,  # [c, d], of all documents
    norms,  # [c]: factors of the tokens' products, as for ``softmax_tiles``
    tiles,  # [tiles, 4]: document; first token, of all; the same, of the document's; how many the document has from there
    first_tiles,  # [documents + 1]: the first tile of each document
    best,  # [documents, t]: the largest product of each query token, without the token's own factor
    selected,  # [documents, t]: its position in the document; not written without SELECT
    t,
    d,
    documents,
    chunk,
    SELECT: tl.constexpr,
    RESIDENT: tl.constexpr,  # whether BLOCK_K ≥ d, so that a program reads its query tokens once
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compare BLOCK_M query tokens with the tokens of ``chunk`` documents, in one loop over all of their tiles."""
    row_blocks = tl.cdiv(t, BLOCK_M)
    i = tl.program_id(0) % row_blocks * BLOCK_M
    first_document = tl.program_id(0) // row_blocks * chunk
    first = tl.load(first_tiles + first_document)
    stop = tl.load(first_tiles + min(first_document + chunk, documents))
    rows = i + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    top = tl.zeros((BLOCK_M,), tl.float32)
    position = tl.zeros((BLOCK_M,), tl.int32)
    if RESIDENT:
        q = queries.load([i, 0])
    for tile in range(first, stop):
        document = tl.load(tiles + 4 * tile).to(tl.int64)
        token = tl.load(tiles + 4 * tile + 1)
        offset = tl.load(tiles + 4 * tile + 2)
        left = tl.load(tiles + 4 * tile + 3)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if RESIDENT:
            acc = tl.dot(q, tokens.load([token, 0]).T, acc, input_precision=PRECISION)
        else:
            for depth in range(0, d, BLOCK_K):
                q = queries.load([i, depth])
                acc = tl.dot(q, tokens.load([token, depth]).T, acc, input_precision=PRECISION)
        factors = tl.load(norms + token + columns, mask=columns < left, other=0.0)
        x = tl.where((columns < left)[None, :], acc * factors[None, :], float("-inf"))
        of_tile = tl.max(x, 1)
        better = (offset == 0) | (of_tile > top) | (of_tile != of_tile)
        if SELECT:
            place = tl.min(tl.where(x == of_tile[:, None], columns[None, :], BLOCK_N), 1)
            place = tl.minimum(place, left - 1)  # of products that are NaN, which equal nothing
            position = tl.where(better, offset + place, position)
        top = tl.where(better, of_tile, top)
        last = (rows < t) & (left <= BLOCK_N)
        tl.store(best + document * t + rows, top, mask=last)
        if SELECT:
            tl.store(selected + document * t + rows, position.to(selected.dtype.element_ty), mask=last)


@triton.jit
def sums_of_sets(
    best,  # [documents, t]
    norms,  # [t]: factors of the rows
    starts,  # [n + 1]: the first token of each query
    scores,  # [n, documents]
    t,
    documents,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add up the rows of each query, in their order."""
    query = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, stop = tl.load(starts + query), tl.load(starts + query + 1)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, stop, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        inside = (columns < documents)[:, None] & (rows < stop)[None, :]
        values = tl.load(best + columns.to(tl.int64)[:, None] * t + rows[None, :], mask=inside, other=0.0)
        total += tl.sum(values * tl.load(norms + rows, mask=rows < stop, other=0.0)[None, :], 1)
    tl.store(scores + query * stride + columns, total, mask=columns < documents)


@triton.jit
def query_gradients(
    tokens,  # [c, d]
    norms,  # [c]
    starts,  # [documents]: the first token of each
    selected,  # [documents, t]
    weights,  # [documents, n], float32: the gradients of the scores
    sets,  # [t]: the query of each token
    out,  # [t, d], float32; it is added to
    t,
    n,
    d,
    documents,
    stride,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the weighted sum of the selected tokens of all documents to the gradient of each query token."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    query = tl.load(sets + rows, mask=rows < t, other=0)
    inside = (rows < t)[:, None] & (features < d)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for document in range(documents):
        at = tl.cast(document, tl.int64)
        position = tl.load(selected + at * t + rows, mask=rows < t, other=0)
        weight = tl.load(weights + at * n + query, mask=rows < t, other=0.0)
        token = tl.load(starts + document) + position.to(tl.int64)
        weight *= tl.load(norms + token, mask=rows < t, other=0.0)
        values = tl.load(tokens + token[:, None] * stride + features[None, :], mask=inside, other=0.0)
        total += weight[:, None] * values.to(tl.float32)
    places = out + rows.to(tl.int64)[:, None] * d + features[None, :]
    tl.store(places, tl.load(places, mask=inside, other=0.0) + total, mask=inside)


@triton.jit
def token_gradients(
    queries,  # [t, d]
    norms,  # [t]
    tiles,  # [tiles, 4], see best_tokens
    selected,  # [documents, t]
    weights,  # [documents, n], float32
    sets,  # [t]
    unit,  # what a weight of 1 stands for
    out,  # [c, d], float32; it is added to
    t,
    d,
    stride,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the weighted sum of the query tokens that selected it to the gradient of each token of a tile.

    The weights are a matrix that is zero where another token is selected: its product needs no atomic addition. Rounded to
    16 bits they would double the gradient's error, so what rounding leaves is multiplied, too.
    """
    tile, depth = tl.program_id(0), tl.program_id(1) * BLOCK_K
    document = tl.load(tiles + 4 * tile).to(tl.int64)
    token = tl.load(tiles + 4 * tile + 1).to(tl.int64)
    offset = tl.load(tiles + 4 * tile + 2)
    left = tl.load(tiles + 4 * tile + 3)
    places = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for i in range(0, t, BLOCK_M):
        rows = i + tl.arange(0, BLOCK_M)
        position = tl.load(selected + document * t + rows, mask=rows < t, other=0).to(tl.int32) - offset
        query = tl.load(sets + rows, mask=rows < t, other=0)
        weight = tl.load(weights + document * stride + query, mask=rows < t, other=0.0)
        weight *= tl.load(norms + rows, mask=rows < t, other=0.0)
        chosen = tl.where(position[None, :] == places[:, None], weight[None, :], 0.0)
        values = queries.load([i, depth])
        high = chosen.to(values.dtype)
        total = tl.dot(high, values, total, input_precision=PRECISION)
        if values.dtype != tl.float32:
            low = (chosen - high.to(tl.float32)).to(values.dtype)
            total = tl.dot(low, values, total, input_precision=PRECISION)
    features = depth + tl.arange(0, BLOCK_K)
    inside = (places < left)[:, None] & (features < d)[None, :]
    at = out + (token + places)[:, None] * d + features[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + total * tl.load(unit), mask=inside)
