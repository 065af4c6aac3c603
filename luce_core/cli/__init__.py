"""The command line. Help and listings import no torch: a command is imported when it is run."""
