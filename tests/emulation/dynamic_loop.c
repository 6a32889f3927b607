/* A loop whose iterations are handed out one by one, from two threads; then
 * where libgomp is mapped, for those who look at the trace. */
#include <omp.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    long sum = 0;
#pragma omp parallel for schedule(dynamic) num_threads(2) reduction(+ : sum)
    for (int i = 0; i < 100; ++i) {
        sum += i;
    }
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        if (strstr(line, "libgomp") != NULL) {
            fputs(line, stdout);
        }
    }
    printf("sum %ld\n", sum);
    return sum == 4950 ? 0 : 1;
}
