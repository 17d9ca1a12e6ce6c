"""Context parallelism of any spec on ``torch.distributed``: sequences that are spread over ranks.

``partition`` says which positions each rank holds, ``context_parallel`` runs an op over the ranks of a group.
"""

from flashgen.distributed.parallel import Choice, ContextParallel, context_parallel
from flashgen.distributed.partition import Partition, partition

__all__ = ["Choice", "ContextParallel", "Partition", "context_parallel", "partition"]
