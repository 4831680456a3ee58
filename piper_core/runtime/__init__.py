"""The runtime: it executes a plan, whatever strategy made it.

====================  ==================================================================================================
files                 what they hold
====================  ==================================================================================================
communicator          the protocol by which a rank talks to others: messages by channel, collectives by group, handles
local                 virtual ranks: many ranks in one process, rendezvous semantics, deadlocks named
gloo, nccl            the same protocol on ``torch.distributed`` processes; ``process_group`` is what they share
groups                which groups a rank is in; how collectives inside graphs reach them
model                 where graphs, initial weights and buffers of one rank come from
graphs, quick         one callable for each macro action: graphs of its chunks joined, gradients added in place;
                      ``overlap`` begins collectives inside early and waits for them late
tables                what each row runs, reads and makes, in one list of steps, from the compiled DAG and plan
lowering              what all ranks of a program in one process share
buffers, storage      flat buckets: parameters, gradients and shards of ZeRO-0 to 3; those of one rank
sync, optimizer       gather, reduce, tie, measure, clip, update; balance biases are in ``balance``
bind, program         ``RankProgram``: one rank's steps as a flat list of callables, run step by step
slices                which part of the global batch each (rank, microbatch) gets, and what its loss weighs
reference             one process that runs the same slices in sequence: what every program must equal
state, measure        what ranks hold of each parameter; measured timelines and peak memory
rehearsal*, compare   a strategy's small double on virtual ranks; ranks against one process
actor, launch         ranks as Ray actors: placed, started, called together, watched, ended (``ray_session``)
trainer, checkpoint   the class that a person's own loop needs; sharded checkpoints that another strategy can load
faults, progress      what ends a run early and who caused it; where every rank is
data, devices         batches of tokens; which devices there are
====================  ==================================================================================================

The entry is :class:`piper_core.runtime.program.RankProgram`: built from what all ranks of a process share
(:class:`piper_core.runtime.lowering.Lowering`: a compiled program and a model source), a rank, its communicator, and
how to train; ``step(tokens, targets)`` runs one step and returns the rank's part of the loss.
"""
