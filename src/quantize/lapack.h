#pragma once
/// \file
/// The LAPACK routines that are used; Debian's OpenBLAS has them, but no header for them.

extern "C" {
void spotrf_(const char* uplo, const int* n, float* a, const int* lda, int* info);
void strtri_(const char* uplo, const char* diag, const int* n, float* a, const int* lda, int* info);
void spotrs_(const char* uplo, const int* n, const int* nrhs, const float* a, const int* lda, float* b,
             const int* ldb, int* info);
}
