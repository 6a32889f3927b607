// Visibility of the C ABI; everything else is hidden (-fvisibility=hidden).
#pragma once
#define VAC_EXPORT __attribute__((visibility("default")))
