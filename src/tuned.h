/* tuned.h - the calls that `adze tune OP --table src/tuned.h` timed with every variant. It writes this file, a
   row per call, which may be more than 600 lines. A row changes the choice of a kernel where its two names
   differ.

   CARD(card, SMs, op, date, driver, commit)
   TUNED(op, form, rows from, to, the other sizes of the problem, fastest variant, the kernel's choice, us of
   each) */
/* clang-format off */
