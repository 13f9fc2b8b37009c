"""Plans: a step's memory, traffic and time on a machine, by its compiler, without the machine."""
