"""Addresses are integers (``Tensor.data_ptr()``); ``octavo.kernels.fused`` checks what lies behind them."""

SPAN: int

def isa() -> str: ...

class Shape:
    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, half: bool
    ) -> None: ...

class ThreadPool:
    """``num_threads`` threads, the caller among them; whoever uses them at the same time waits."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class AttentionPlan:
    def __init__(
        self,
        *,
        block_table: int,
        seq_lens: int,
        cu_seqlens_q: int,
        num_seqs: int,
        max_blocks: int,
        shape: Shape,
        share: bool,
        pool: ThreadPool,
        isa: str,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def keys_read(self) -> int: ...
    def run(
        self,
        q: int,
        q_stride: int,
        key: int,
        value: int,
        num_blocks: int,
        scale: float,
        window: int,
        out: int,
        lse: int,
    ) -> None: ...

class PackedWeight:
    """A weight [outputs, inputs] in its stored bits, in the kernels' order; see ``csrc/linear.h``."""

    def __init__(self, type: str, outputs: int, inputs: int) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def pack_rows(self, data: int, first: int, rows: int, pool: ThreadPool) -> None: ...
    def expand_row(self, row: int, out: int) -> None: ...

def linear(
    *,
    weights: list[PackedWeight],
    x: int,
    rows: int,
    x_stride: int,
    bias: int,
    residual: int,
    out: int,
    out_stride: int,
    pool: ThreadPool,
    isa: str,
) -> None: ...
def write_kv(
    *,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    slots: int,
    num_tokens: int,
    key: int,
    value: int,
    num_blocks: int,
    shape: Shape,
    isa: str,
) -> None: ...
def exp(x: int, n: int, out: int, isa: str) -> None: ...
def read_memory(data: int, bytes: int, pool: ThreadPool) -> int: ...
