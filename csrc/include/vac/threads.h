/* Where the team's threads run. */
#ifndef VAC_THREADS_H
#define VAC_THREADS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Binds thread i of the calling thread's OpenMP team to CPU cpus[i], thread 0
 * (the caller) included; later parallel regions of that size reuse the same
 * threads. cpus: [num_threads], CPU numbers as the kernel counts them.
 * Returns how many threads were bound, or -errno of the first that was not. */
int vac_pin_threads(const int32_t *cpus, uint32_t num_threads);

/* The CPU that each thread of a team of num_threads runs on, into
 * cpus [num_threads]; -1 where the team came out smaller. */
void vac_thread_cpus(int32_t *cpus, uint32_t num_threads);

#ifdef __cplusplus
}
#endif
#endif
