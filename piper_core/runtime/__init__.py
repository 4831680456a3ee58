"""The runtime: it executes a plan, whatever strategy made it.

==================  ==================================================================================================
file                what it holds
==================  ==================================================================================================
``communicator``    the protocol by which a rank talks to others: messages by channel, collectives by group, handles
``local``           virtual ranks: many ranks in one process, rendezvous semantics, deadlocks named
``gloo``            the same protocol on ``torch.distributed`` processes
``collectives``     the collectives inside chunk graphs, led to the communicator of the rank that runs them
``model``           where graphs and initial weights of one rank come from
``graphs``          one callable for each macro action: graphs of its chunks joined, gradients added up in place
``buffers``         flat buckets: parameters, gradients and shards of ZeRO-0 to 3
``tables``          what each action of a rank runs, reads and makes, from the compiled DAG and plan
``optimizer``       AdamW and SGD on shards, gradient clipping
``program``         ``RankProgram``: one rank's plan lowered to a flat list of callables, run step by step
``slices``          which part of the global batch each (rank, microbatch) gets, and what its loss weighs
``reference``       one process that runs the same slices in sequence: what every program must equal
``measure``         measured timelines and peak memory
==================  ==================================================================================================

The entry is :class:`piper_core.runtime.program.RankProgram`: built from what all ranks of a process share
(:class:`piper_core.runtime.lowering.Lowering`: a compiled program and a model source), a rank, its communicator, and
how to train; ``step(tokens, targets)`` runs one step and returns the rank's part of the loss.
"""
