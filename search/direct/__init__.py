"""From a configuration straight to what the simulator reads, without program, DAG or lowering.

The search's inner loop: ``search.direct.score`` says what a configuration costs in milliseconds. A law test
(``tests/null/test_direct.py``) proves that its arrays, times and bytes are those of apply, plan and lower; what it does
not cover goes that way (``search.direct.covers``).
"""
