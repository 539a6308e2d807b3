// What the text of a program tells, after preprocessing: its kernels, and functions that lack __device__.
#pragma once

#include <string>

namespace cuda_stand_in {

// Descriptions of the kernels, to be compiled behind the program.
std::string kernels_text(const std::string& preprocessed);

// The head of the first function that neither device code nor the compiler could call, or an empty text. The
// real compiler refuses its use in kernels; here it would pass.
std::string function_without_device(const std::string& preprocessed);

}  // namespace cuda_stand_in
