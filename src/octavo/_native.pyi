"""Addresses are integers (``Tensor.data_ptr()``); ``octavo.kernels.fused`` checks what lies behind them."""

SPAN: int

def isa() -> str: ...

class Shape:
    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, half: bool
    ) -> None: ...

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
        num_threads: int,
        isa: str,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...
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
def read_memory(data: int, bytes: int, num_threads: int) -> int: ...
