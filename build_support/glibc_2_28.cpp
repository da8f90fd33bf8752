// Defines the symbols that newer headers of glibc and libstdc++ require and the libraries of
// manylinux_2_28 lack. Only the wheel's library is linked with it, and hides them.
#include <new>
#include <sstream>

// Since glibc 2.32: whether shared_ptr may count without atomic instructions. It may not.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

namespace std {

// Since GCC 11: what an allocator throws for a negative or too large count.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

// Since GCC 9 and 11 in the library; their templates are in the headers.
template basic_stringstream<char>::basic_stringstream();
template string basic_stringbuf<char>::str() const&;
template string basic_stringbuf<char>::str() &&;

}  // namespace std
