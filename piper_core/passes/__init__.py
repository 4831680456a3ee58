"""Compiler passes: rewrites that follow from directives rather than being asked for by one."""
