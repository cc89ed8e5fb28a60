//! Speed beside other tools, interleaved in one run.
