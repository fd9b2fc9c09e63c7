/* What generate.sh makes the bindings from. */
#include <infiniband/verbs.h>

/* The header hides this symbol behind an inline function of the same name. */
#undef ibv_query_port
