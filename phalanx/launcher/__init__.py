"""Starts, watches and ends the processes of a job.

    cores, environment   what each worker gets: its cores, its TF_CONFIG, its secret
    child                what runs first inside every worker, before the user's program
    progress             where a worker says what it is doing; free when nobody listens
    exit_codes           which error ends a process with which code
    lifeline             why no worker outlives its launcher
    local, agent, remote the processes of this host, and of others through ssh
    pool                 the hosts of a job whose members come and go: roster (who sits where), standing (which
                         are set aside), discovery and asking (a script that names them)
    heartbeat, comparison how long workers compute and wait, and who is slow
    screen               many outputs on one terminal
    verdict, page        which task was the cause, and the page that says so
    job                  the loop over all of it
    function, replicas   the same from Python: `phalanx.launch`, `MirroredStrategy`

Nothing is imported here: workers import parts of this package before anything else, and pay for no more.
"""
