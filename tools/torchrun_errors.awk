# Leaves of what torchrun writes to standard error what its ranks wrote, and says of each rank that
# failed how it ended. A traceback of torchrun's own trouble is shown as it is.

function flush_traceback() {
  if (traceback !~ /ChildFailedError/) printf "%s", traceback
  traceback = ""
}

# torchrun's log: a level with the date, the time, the process and a source file.
/^[IWE][0-9][0-9][0-9][0-9] [0-9:.]+ +[0-9]+ [^ ]*torch\// { next }
/^\*+$/ || /^Setting OMP_NUM_THREADS/ { next }

/^Traceback \(most recent call last\):/ { in_traceback = 1 }
!in_traceback { print; fflush(); next }

{ traceback = traceback $0 "\n" }
/^ *rank +: [0-9]+/ { rank = $3 }
/^ *exitcode +: / {
  if ($3 < 0) print "tools/train: rank " rank " was ended by signal " (0 - $3)
  else print "tools/train: rank " rank " failed with exit code " $3
  fflush()
}

END { flush_traceback() }
