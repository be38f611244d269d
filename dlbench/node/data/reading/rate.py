"""``python -P -m dlbench.node.data.reading.rate``: reads a data set as training does, and does not train.

One JSON object on stdin::

    {
      "model": {...},            as `workload.model` in plan.json
      "data": {...},             as `workload.data` in plan.json: source, format, loader_workers (a number or "auto"),
                                 prefetch_batches (a number or "auto"), cache (any, cold, warm), on_bad_sample, ...
                                 staging, shuffle and partition are not acted upon: what is read is `source`, shuffled
      "seed": 0,                 of order and augmentation
      "batch": 32,               samples of one batch of one process
      "processes": 2,            that read their shares of the data set at the same time, as ranks of a node do
      "cores_per_process": null, null: the cores that may be used, shared evenly (at least one each)
      "seconds": 5.0,            that each repeat reads for at least
      "repeats": 5
    }

One JSON line on stdout, when all is done::

    {
      "format": "dlbench.reading-rate",
      "kind": "jpeg-tree", "num_samples": 640, "set_bytes": 71303168,   set_bytes: of the set's files
      "processes": 2, "cores_per_process": 1, "batch": 32, "seconds": 5.0,
      "loader_workers": 1, "prefetch_batches": 2,                       in force; prefetch 0 where workers is 0
      "trials": [{"loader_workers": 0, "prefetch_batches": 0, "computing": false, "samples_per_s": 310.2}, ...],
      "cache": "cold",                                                  as asked
      "cache_told": "emptied by fadvise ...; 0.0 % of ...",             what became of it, in words
      "cache_in_force": true,                                           at the beginning of every repeat
      "warnings": ["..."],
      "repeats": [
        {
          "cached_share": 0.0,             of the set's pages when the repeat began; null: the kernel does not tell
          "cache_in_force": true,
          "together": RATE,                samples, bytes and seconds of reading summed over the processes; `seconds` is
                                           the mean of theirs, samples_per_s and bytes_per_s are sums of theirs
          "processes": [RATE, ...]
        }, ...
      ]
    }

    RATE = {"samples": 4096, "seconds": 5.01, "samples_per_s": 817.6,
            "raw_bytes": 450000000, "bytes_per_s": 89820359.3,          stored bytes of the samples, all tiers
            "tier_bytes": {"shared": 450000000},
            "storage_bytes": 0,            bytes that came from devices; null: the kernel does not count them
            "fetch_s": 1.0, "prepare_s": 3.9,   in fetching and in decoding, summed over the readers of the process
            "passes": 0.51,                share of its part of the set that the process read; above 1: again and again
            "is_short": false}             a cold repeat ends with the first pass: fewer seconds than asked for

What the queues of readers held when the clock started is not counted. With cache `cold` the data set is evicted before
each repeat, and a repeat ends with its first pass. The exit code is that of a `dlbench.errors.DlbenchError`, whose line
is on stderr after ``dlbench: error:``; stdout is empty then.
"""

from __future__ import annotations
