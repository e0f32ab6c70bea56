"""The `hilbert` command: main has the group; bench, plan and claims are subcommands of their own."""
