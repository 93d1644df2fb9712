/* tuned.h - the calls that `adze tune` timed with every variant, written by it: `adze tune OP --table src/tuned.h`.
 */
