"""Process groups in plans: by name, because plans are hashed, compared, pickled and traced by compilers."""

from typing import Any

import torch.distributed as dist


def name_of(group: Any) -> str:
    """The name of a process group; None is the default one."""
    found: str = dist.distributed_c10d._get_default_group().group_name if group is None else group.group_name
    return found


def group_of(name: str) -> Any:
    """The process group with that name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]
