"""Programs of directives: canonical order, application, and the strategy file."""
