"""A chain for a batch that was not measured."""

from __future__ import annotations

from dlbench.specs.memory.chain import Chain


def scaled(chain: Chain, batch: int) -> Chain:
    """The chain for another batch: times and activations in proportion to the samples, the state as it is.

    An approximation: small batches compute less well, and workspaces need not grow with the batch.
    """
    factor = batch / chain.batch
    times = ("before_s", "turn_s", "after_s")
    return chain.model_copy(
        update={
            "units": tuple(
                unit.model_copy(
                    update={
                        "forward_s": unit.forward_s * factor,
                        "backward_s": unit.backward_s * factor,
                        "saved_bytes": round(unit.saved_bytes * factor),
                        "input_bytes": round(unit.input_bytes * factor),
                    }
                )
                for unit in chain.units
            ),
            "batch": batch,
            **{name: getattr(chain, name) * factor for name in times},
            **{
                name: round(getattr(chain, name) * factor)
                for name in ("output_bytes", "outside_bytes", "working_bytes")
            },
        }
    )
