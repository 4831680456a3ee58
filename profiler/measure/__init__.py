"""The half of the profiler that needs torch: it runs chunks, transfers and steps, and times them.

=============  ========================================================================================
file           what it holds
=============  ========================================================================================
``clock``      one protocol over CUDA events and the monotonic clock
``repeat``     how often a call is timed: until the interval is tight or its time is gone
``layers``     real values for one layer of each kind, and the graphs of its chunks in each phase
``chunks``     what there is to time for the shapes asked, each distinct graph once
``alone``      a communicator for one rank, so that chunks of divided models run without the others
``processes``  several processes of one machine, gloo or NCCL
``exchanges``  collectives and messages as the runtime makes them
``transfers``  collectives, messages, and work beside them
``updates``    the optimiser step
``sitting``    all of it, within a budget, kept as it goes
``steps``      whole steps of strategies, by the runtime
=============  ========================================================================================
"""
