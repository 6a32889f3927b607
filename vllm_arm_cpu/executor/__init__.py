"""Several ranks on one machine: processes on their NUMA nodes, and collectives in shared memory."""
